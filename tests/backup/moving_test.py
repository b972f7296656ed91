"""A job moves to other devices, by a signal, within an epoch."""

import json
import os
import signal
import subprocess
import tempfile

import pytest
from absl.testing import absltest

from tests import forked_python
from tests.backup.jobs import assert_close
from tests.source_files import REPOSITORY

_SECONDS = 200


class MovingTest(absltest.TestCase):
    @pytest.mark.crossing
    def test_two_workers_move_to_one_process_with_two_devices(self):
        program = "tests.backup.moving_program"
        with tempfile.TemporaryDirectory() as folder:
            launcher = subprocess.Popen(
                [
                    *(forked_python.executable(), "-m", "tfscale.launch"),
                    *("--num_workers=2", "--devices_per_worker=1", "-m"),
                    *(program, folder),
                ],
                cwd=REPOSITORY,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            said = ""
            while "step 1 1" not in said and (
                line := launcher.stdout.readline()
            ):
                said += line
            launcher.send_signal(signal.SIGTERM)
            said += launcher.communicate(timeout=_SECONDS)[0]
            self.assertEqual(launcher.returncode, 128 + signal.SIGTERM, said)
            process = forked_python.run(
                ["-m", program, folder], REPOSITORY, timeout=_SECONDS
            )
            said = process.stdout + process.stderr
            self.assertEqual(process.returncode, 0, said)
            with open(f"{folder}/found") as file:
                found = json.load(file)
        moved, other = found["moved"], found["another mesh"]
        whole = found["whole"]
        # In the second of three epochs of five steps, and no step twice.
        self.assertIn(moved["made"][0], [[1, 2], [1, 3], [1, 4]])
        self.assertEqual(moved["made"], whole["made"][-len(moved["made"]) :])
        self.assertEqual(other["made"], moved["made"])
        with self.subTest("as many replicas: bit for bit"):
            self.assertEqual(moved["weights"], whole["weights"])
            self.assertEqual(moved["loss"], whole["loss"])
        with self.subTest("another mesh: up to rounding"):
            for value, expected in zip(
                [*other["weights"], other["loss"]],
                [*whole["weights"], whole["loss"]],
                strict=True,
            ):
                assert_close(value, expected, 1e-6)


if __name__ == "__main__":
    absltest.main()
