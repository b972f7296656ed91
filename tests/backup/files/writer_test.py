"""Backups are written beside the training, and completed."""

import functools
import signal
import threading

from absl.testing import absltest

from tests import forked_processes
from tests import forked_python
from tests.source_files import REPOSITORY
from tfscale.backup.files.writer import Writer


class WriterTest(absltest.TestCase):
    def test_a_job_runs_beside_who_started_it(self):
        writer, go_on, done = Writer(), threading.Event(), []

        def job():
            go_on.wait(10.0)
            done.append(1)

        writer.start(job)
        self.assertTrue(writer.is_busy)
        self.assertEmpty(done)
        go_on.set()
        writer.wait()
        self.assertFalse(writer.is_busy)
        self.assertEqual(done, [1])

    def test_a_job_that_is_waited_for_is_not_delayed(self):
        for end in (Writer.wait, Writer.join):
            writer, done = Writer(), []
            writer.start(functools.partial(done.append, 1), delay=3600.0)
            self.assertTrue(writer.is_busy)
            end(writer)
            self.assertEqual(done, [1])

    def test_an_error_is_raised_once(self):
        def fail():
            raise OSError("no space left")

        writer = Writer()
        writer.start(fail)
        with self.assertRaisesRegex(OSError, "no space left"):
            writer.wait()
        writer.check()
        writer.start(fail)
        writer.join()  # whatever became of it
        writer.wait()

    def test_a_forked_child_has_a_thread_of_its_own(self):
        # That of its parent does not run there: a save waited for ever.
        def work():
            signal.alarm(20)
            writer = Writer()
            writer.start(lambda: None)
            writer.wait()

        Writer().start(lambda: None)
        status, said = forked_processes.output_of(work)
        self.assertEqual((status, said), (0, ""))

    def test_a_program_that_is_over_waits_until_it_is_written(self):
        text = (
            "import time\n"
            "from tfscale.backup.files.writer import Writer\n"
            "Writer().start(lambda: (time.sleep(0.3), print('done')))"
        )
        said = forked_python.run(["-c", text], REPOSITORY, timeout=60)
        self.assertEqual(said.stdout, "done\n", said.stderr)


if __name__ == "__main__":
    absltest.main()
