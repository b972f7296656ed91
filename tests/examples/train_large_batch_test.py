import tempfile

from absl.testing import absltest

from tests import forked_python
from tests.source_files import REPOSITORY


class TrainLargeBatchTest(absltest.TestCase):
    def test_it_says_what_was_found(self):
        process = forked_python.run(
            [
                *("-m", "examples.train_large_batch"),
                *("--num_epochs=2", "--batch_sizes=16,32"),
                "--files=bisect.py",
                f"--backup_dir={tempfile.mkdtemp()}",
            ],
            REPOSITORY,
        )
        self.assertEqual(process.returncode, 0, process.stderr)
        self.assertRegex(
            process.stdout,
            r"epoch 0: loss \d\.\d+, batches of 16 rows, "
            r"noise scale \d+ rows\n"
            r"epoch 1: loss \d\.\d+, batches of (16|32) rows, noise scale",
        )


if __name__ == "__main__":
    absltest.main()
