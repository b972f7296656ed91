"""Workers are saved together, stop at the same step, and go on together.

This process runs `workers_program.py`, which forks the workers, kills, stops
and restarts them, and writes what they found; here that is compared.
"""

import json
import os
import tempfile

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tests.backup import workers_program
from tests.backup.jobs import assert_close
from tests.source_files import REPOSITORY

_SECONDS = 400


class WorkersTest(parameterized.TestCase):
    def test_killed_stopped_and_with_fewer_workers(self):
        with tempfile.TemporaryDirectory() as folder:
            process = forked_python.run(
                ["-m", "tests.backup.workers_program", folder],
                cwd=REPOSITORY,
                timeout=_SECONDS,
            )
            found = {}
            for name in os.listdir(folder):
                if name.endswith(("_0", "_1")):
                    with open(os.path.join(folder, name)) as file:
                        found[name] = json.load(file)
        said = process.stdout + process.stderr
        self.assertEqual(process.returncode, 0, said)
        self.assertNotIn("killed_1", found)  # it was
        for worker in "01":
            whole, stopped = (
                found[f"whole_{worker}"],
                found[f"stopped_{worker}"],
            )
            end = found[f"end_{worker}"]
            with self.subTest("a worker was killed after six steps"):
                # At most two saves before, of which there is one in two steps.
                first = whole["made"].index(stopped["made"][0])
                self.assertBetween(first, 2, 6)
            with self.subTest("a worker was asked to stop"):
                self.assertEqual(stopped["status"], 143)
                self.assertEqual(
                    stopped["made"], whole["made"][first : first + 3]
                )
            with self.subTest("all goes on bit for bit"):
                self.assertEqual(end["made"], whole["made"][first + 3 :])
                self.assertEqual(end["tested"], whole["tested"][5:])
                self.assertEqual(end["history"], whole["history"])
                self.assertEqual(end["weights"], whole["weights"])
        with self.subTest("with one worker for two"):
            alone, whole = found["alone_0"], found["whole_0"]
            self.assertLen(alone["made"], len(whole["made"]) - first - 3)
            for value, expected in zip(
                alone["weights"], whole["weights"], strict=True
            ):
                assert_close(value, expected, 1e-5)

    def assert_each_number_once(self, counted):
        self.assertBetween(counted["made"][0][1], 1, 12)  # and not before
        numbers = range(1, workers_program.NUMBERS + 1)
        for power in (1, 2):
            once = float(sum(n**power for n in numbers))
            totals = counted["history"][f"total_{power}"]
            self.assertEqual(totals, [once, once])

    @parameterized.named_parameters(
        (
            "the_launcher_goes_on_without_one_that_was_killed",
            (
                *("-m", "tfscale.launch"),
                *("--min_workers=1", "--max_workers=2"),
                *("--grace_seconds=1", "-m"),
            ),
            (),
            "counted_by_1_0",
            "without worker 1: 1 workers, 1 at least",
        ),
        ("workers_of_1_4_2_and_3", ("-m",), ("sizes",), "counted_0", ""),
    )
    @pytest.mark.crossing
    def test_each_number_once_in(self, command, arguments, result, says):
        with tempfile.TemporaryDirectory() as folder:
            said = forked_python.output(
                [
                    *command,
                    *("tests.backup.workers_program", folder, *arguments),
                ],
                cwd=REPOSITORY,
                timeout=_SECONDS,
            )
            with open(f"{folder}/{result}") as file:
                self.assert_each_number_once(json.load(file))
        self.assertIn(says, said)


if __name__ == "__main__":
    absltest.main()
