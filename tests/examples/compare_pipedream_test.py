from absl.testing import absltest

from tests import forked_python
from tests.source_files import REPOSITORY


class ComparePipedreamTest(absltest.TestCase):
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


if __name__ == "__main__":
    absltest.main()
