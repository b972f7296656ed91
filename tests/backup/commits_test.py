"""A backup of two workers is there whole or not at all, whoever is killed."""

import json

import tensorflow as tf

from tests import forked_python
from tests.backup import commits
from tests.source_files import REPOSITORY
from tfscale.backup.files.folder import BackupFolder

_SECONDS = 200


class CommitsTest(tf.test.TestCase):
    def test_one_is_killed_before_each_thing_that_it_does_to_a_file(self):
        top = self.create_tempdir().full_path
        process = forked_python.run(
            ["-m", "tests.backup.commits", top], REPOSITORY, timeout=_SECONDS
        )
        self.assertEqual(process.returncode, 0, process.stderr)
        found = json.loads(process.stdout.splitlines()[-1])
        killed = [name for name, codes in found.items() if -9 in codes]
        # Worker 0: the folder, that it is unfinished, its tensors, what joins
        # them, its state, the manifest, that it is finished; that the backup
        # before is unfinished, its manifest and its state. Worker 1: its
        # tensors, what joins them, and its state.
        for worker, count in ((0, 10), (1, 3)):
            mine = [
                name for name in killed if name.startswith(f"worker {worker}")
            ]
            self.assertLen(mine, count)
        steps = []
        for name, codes in found.items():
            folder = BackupFolder(f"{top}/{name}/backups", keep=1)
            folder.acquire()
            backup = folder.newest()
            steps.append(backup.step)
            for worker in (0, 1):
                self.assertAllEqual(
                    backup.read_whole(f"worker {worker}"), [backup.step, worker]
                )
                self.assertEqual(backup.state_of(worker)["worker"], worker)
            if -9 not in codes:
                self.assertEqual(backup.step, 2)
            # The next ones go on there, and what was left behind is removed.
            folder.commit(3, commits.parts_of(0, 3), {})
            self.assertEqual(folder.newest().step, 3)
            folder.release()
        self.assertEqual(set(steps), {1, 2})


if __name__ == "__main__":
    tf.test.main()
