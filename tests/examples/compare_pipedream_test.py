import pytest
from absl.testing import absltest

from tests import forked_python
from tests.source_files import REPOSITORY


class ComparePipedreamTest(absltest.TestCase):
    @pytest.mark.crossing
    def test_it_prints_both_curves(self):
        process = forked_python.run(
            [
                *("-m", "examples.compare_pipedream", "--num_blocks=1"),
                *("--width=16", "--num_heads=2", "--sequence_length=8"),
                *("--batch_size=4", "--num_epochs=2", "--steps_per_epoch=4"),
                *("--validation_steps=1", "--window=2"),
            ],
            REPOSITORY,
        )
        self.assertEqual(process.returncode, 0, process.stderr)
        self.assertRegex(
            process.stdout,
            r"1f1b  pipedream .*\n +4 +\d\.\d+ +\d\.\d+\n +8 +\d\.\d+",
        )

    def test_both_train_on_as_many_batches(self):
        # PipeDream trained on five batches of an epoch of three.
        process = forked_python.run(
            [
                *("-m", "examples.compare_pipedream", "--num_blocks=1"),
                *("--width=16", "--num_heads=2", "--sequence_length=8"),
                *("--batch_size=4", "--num_epochs=1", "--steps_per_epoch=3"),
                *("--validation_steps=1", "--window=5"),
            ],
            REPOSITORY,
        )
        self.assertNotEqual(process.returncode, 0)
        said = process.stdout + process.stderr
        self.assertIn("must be a multiple of --window", said)


if __name__ == "__main__":
    absltest.main()
