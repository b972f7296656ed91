"""Backups are written evenly in the time there is, unless somebody waits."""

import subprocess
import sys
import threading
from unittest import mock

import numpy as np
from absl.testing import absltest

from tests.source_files import REPOSITORY
from tfscale.backup.files import pace
from tfscale.backup.files.writer import Writer


class PaceTest(absltest.TestCase):
    def begins(self, num_bytes, seconds, took, **kwargs):
        """When each quarter of the work begins, if each takes so long."""
        now = 100.0
        begins = []
        with (
            mock.patch.object(pace.time, "monotonic", lambda: now),
            mock.patch.object(pace.threading, "Event") as event,
        ):

            def wait(rest):
                nonlocal now
                now += rest + 1e-9

            event.return_value.wait = wait
            found = pace.Pace(num_bytes, seconds, **kwargs)
            found.begin()
            for _ in range(4):
                begins.append(now - 100.0)
                now += took
                found.did(num_bytes // 4)
        return begins

    def test_it_is_spread_over_the_time_that_there_is(self):
        found = self.begins(1 << 30, 4.0, 0.25)
        np.testing.assert_allclose(found, [0.0, 1.0, 2.0, 3.0], atol=1e-6)

    def test_it_rests_no_longer_than_training_needs(self):
        found = self.begins(256_000_000, 1e6, 0.25)
        np.testing.assert_allclose(found, [0.0, 1.0, 2.0, 3.0], atol=1e-6)

    def test_the_step_that_copies_what_is_held_is_over_first(self):
        """It was longer by what it copies, and by what was written beside."""
        found = self.begins(1 << 30, 5.0, 0.25, delay=1.0)
        np.testing.assert_allclose(found, [1.0, 2.0, 3.0, 4.0], atol=1e-6)

    def test_it_does_not_rest_beside_accelerators(self):
        found = self.begins(1 << 30, 5.0, 0.25, delay=1.0, rests=False)
        np.testing.assert_allclose(found, [1.0, 1.25, 1.5, 1.75], atol=1e-6)

    def test_work_that_is_late_does_not_rest(self):
        self.assertEqual(self.begins(1 << 30, 4.0, 2.0), [0.0, 2.0, 4.0, 6.0])

    def test_who_waits_for_a_save_does_not_wait_for_its_rests(self):
        """A SIGTERM leaves some seconds to be saved in."""
        slow = pace.Pace(1 << 40, 1e6)
        begun = threading.Event()

        def job():
            begun.set()
            slow.did(1 << 40)  # an hour and more

        writer = Writer()
        writer.start(job, slow)
        begun.wait()
        self.assertTrue(writer.is_busy)
        writer.wait()
        self.assertFalse(writer.is_busy)

    def test_a_program_that_is_over_does_not_wait_for_rests_either(self):
        """It had, after an error in `fit`, until the backup was there."""
        text = (
            "from tfscale.backup.files.pace import Pace\n"
            "from tfscale.backup.files.writer import Writer\n"
            "pace = Pace(1 << 40, 1e6)\n"
            "Writer().start(lambda: [pace.did(1 << 40), print('done')], pace)"
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
