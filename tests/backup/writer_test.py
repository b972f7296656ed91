"""Backups are written a little later, unless somebody waits for them."""

import subprocess
import sys
import threading
import time

from absl.testing import absltest

from tests.source_files import REPOSITORY
from tfscale.backup.files.writer import Writer


class WriterTest(absltest.TestCase):
    def test_the_step_that_copies_what_is_held_is_over_first(self):
        """It was longer by what it copies, and by what was written beside."""
        begun, writer, start = [], Writer(), time.monotonic()
        written = threading.Event()

        def job():
            begun.append(time.monotonic() - start)
            written.set()

        writer.start(job, delay=0.2)
        self.assertTrue(written.wait(10.0))
        self.assertGreaterEqual(begun[0], 0.2)
        writer.wait()

    def test_who_waits_for_a_save_does_not_wait_for_its_delay(self):
        """A SIGTERM leaves some seconds to be saved in."""
        writer, done = Writer(), []
        writer.start(lambda: done.append(1), delay=1e6)
        self.assertTrue(writer.is_busy)
        writer.wait()
        self.assertFalse(writer.is_busy)
        self.assertEqual(done, [1])

    def test_a_program_that_is_over_does_not_wait_for_it_either(self):
        """It had, after an error in `fit`, until the backup was there."""
        text = (
            "from tfscale.backup.files.writer import Writer\n"
            "Writer().start(lambda: print('done'), delay=1e6)"
        )
        said = subprocess.run(
            [sys.executable, "-c", text],
            cwd=REPOSITORY,
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        )
        self.assertEqual(said.stdout, "done\n")


if __name__ == "__main__":
    absltest.main()
