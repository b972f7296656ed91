"""Workers and parameter servers end as their chief does, and say why."""

import os

from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_cluster

PROGRAM = "tests.cluster.lost_chief"


class LostChiefTest(parameterized.TestCase):
    def run_program(self, way, is_restarted=False):
        """The exit codes, and what each process printed."""
        folder = self.create_tempdir().full_path
        with open(os.path.join(folder, "way"), "w") as file:
            file.write(way)
        codes = forked_cluster.run(
            PROGRAM,
            {"chief": 1, "worker": 1, "ps": 1},
            folder,
            spares=[("worker", 0)] if is_restarted else (),
        )
        logs = {}
        for name in codes:
            with open(os.path.join(folder, f"{name}.log")) as file:
                logs[name] = file.read()
        return codes, logs

    @parameterized.parameters(
        ("is killed", -9, "is gone, and had not ended: it was killed"),
        ("fails", 1, "has failed with ValueError: There is no such file.$"),
    )
    def test_they_fail_if_their_chief_is_lost(self, way, code, words):
        # They exited with 0, which Slurm takes for success.
        codes, logs = self.run_program(way)
        self.assertEqual(codes, {"chief0": code, "worker0": 1, "ps0": 1})
        for name in ("worker0", "ps0"):
            last = logs[name].splitlines()[-1]
            self.assertRegex(
                last,
                r"^ConnectionError: The chief of a cluster must run .*"
                rf"the chief at localhost:\d+ {words.rstrip('$')}",
            )
            self.assertNotIn("Nor another one", logs[name])

    def test_they_end_well_with_it(self):
        codes, _ = self.run_program("ends")
        self.assertEqual(codes, {"chief0": 0, "worker0": 0, "ps0": 0})

    def test_a_code_of_its_chief_is_its_own(self):
        # Python tells nobody that `sys.exit` was called, and with what.
        codes, _ = self.run_program("exits")
        self.assertEqual(codes, {"chief0": 3, "worker0": 0, "ps0": 0})

    @parameterized.parameters("a worker comes back", "a worker comes back late")
    def test_one_that_was_started_again_ends_well_too(self, way):
        # Late is after the others have been told: it waits for it.
        codes, logs = self.run_program(way, is_restarted=True)
        expected = {"chief0": 0, "worker0": -9, "worker0_again": 0, "ps0": 0}
        self.assertEqual(codes, expected, str(logs))


if __name__ == "__main__":
    absltest.main()
