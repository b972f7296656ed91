import pytest
from absl.testing import absltest

from tests import forked_python
from tests.source_files import REPOSITORY


class TrainPreemptibleTest(absltest.TestCase):
    @pytest.mark.crossing
    def test_it_is_killed_and_ends_as_if_it_had_not_been(self):
        process = forked_python.run(
            [
                *("-m", "examples.train_preemptible"),
                "--num_kills=1",
                *("--steps_to_kill=10", "--save_freq=4", "--num_epochs=1"),
                "--batch_size=300",
            ],
            REPOSITORY,
        )
        self.assertEqual(process.returncode, 0, process.stderr)
        self.assertRegex(
            process.stdout,
            # It may be a step further until the signal is there.
            r"trained from step 1 to 1[0-9], then killed\n"
            r"trained from step (5|9|13) to \d+\n"
            r"without an interruption:\n"
            r"trained from step 1 to \d+\n"
            r"The weights are the same, bit for bit.\n",
        )


if __name__ == "__main__":
    absltest.main()
