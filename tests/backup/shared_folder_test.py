"""Workers save into one folder: where they have several, that is said."""

import concurrent.futures
import os
import threading
from unittest import mock

from absl.testing import absltest

from tfscale._internals import attributes
from tfscale.backup.files import folder
from tfscale.cluster.coordination import Coordination

_SECONDS = 60


class SharedFolderTest(absltest.TestCase):
    def look(self, paths):
        """What workers with these paths raise, each in a thread."""
        said, is_said = {}, threading.Condition()

        def put(key, value):
            with is_said:
                said[key] = value
                is_said.notify_all()

        def get(key, timeout_in_ms):
            with is_said:
                is_said.wait_for(lambda: key in said, timeout_in_ms / 1e3)
                return said.get(key)

        def work(index, worker):
            folder.BackupFolder(paths[index], keep=1).be_seen(worker)

        workers = [Coordination(len(paths), i) for i in range(len(paths))]
        with (
            mock.patch.object(attributes, "put_key_value", put),
            mock.patch.object(attributes, "get_key_value", get),
            mock.patch.object(folder, "_SECONDS_TO_SEE", 0.1),
            concurrent.futures.ThreadPoolExecutor(len(paths)) as threads,
        ):
            found = [threads.submit(work, *each) for each in enumerate(workers)]
            self.addCleanup(lambda: [one.stop_waiting() for one in workers])
            return [str(one.exception(_SECONDS)) for one in found]

    def test_one_folder(self):
        path = self.create_tempdir().full_path
        self.assertEqual(self.look([path] * 2), ["None"] * 2)
        self.assertEmpty(os.listdir(path))  # nothing stays behind

    def test_a_disk_of_one_machine(self):
        own, other = (self.create_tempdir().full_path for _ in range(2))
        for error in self.look([own, own, other]):
            self.assertRegex(
                error, r"one folder that all workers see\. .* workers \[2\] do"
            )


if __name__ == "__main__":
    absltest.main()
