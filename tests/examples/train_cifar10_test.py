import os
import re

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tests.source_files import REPOSITORY

# Stands in for the download: pictures of noise, with the labels of CIFAR-10.
WITHOUT_DOWNLOAD = """
import tensorflow_datasets as tfds
from absl import app
from examples import train_cifar10

train_cifar10.check_download = lambda: None
with tfds.testing.mock_data(num_examples=20):
    app.run(train_cifar10.main)
"""


# As a machine without a network: a port at which nobody listens.
WITHOUT_NETWORK = """
from absl import app
from examples import train_cifar10

train_cifar10.SERVER = "http://localhost:1"
app.run(train_cifar10.main)
"""


class TrainCifar10Test(parameterized.TestCase):
    def test_without_a_network_it_says_so_at_once(self):
        # tensorflow-datasets tried for 150 seconds.
        folder = self.create_tempdir().full_path
        process = forked_python.run(
            [
                *("-c", WITHOUT_NETWORK),
                "--flagfile=configs/cifar10_mirrored.flags",
                f"--data_dir={folder}",
            ],
            REPOSITORY,
            timeout=100,
        )
        self.assertEqual(process.returncode, 1, process.stderr)
        self.assertRegex(
            process.stderr,
            f"{folder}.*localhost:1.*--data_dir.*--dataset=photo",
        )
        self.assertEmpty(os.listdir(folder))

    @parameterized.parameters(
        ("cifar10_pipeline.flags", "--batch_size=8", "--num_microbatches=2"),
        # Thousands of patches: large batches for a small network.
        ("cifar10_photo.flags", "--batch_size=2048"),
    )
    @pytest.mark.crossing
    def test_it_trains_and_validates_with(self, config, *small):
        process = forked_python.run(
            [
                *("-c", WITHOUT_DOWNLOAD),
                f"--flagfile=configs/{config}",
                *("--num_epochs=1", "--width=1"),
                *small,
            ],
            REPOSITORY,
        )
        self.assertEqual(process.returncode, 0, process.stderr)
        (epoch,) = re.findall(
            r"- accuracy: (\S+) - loss: (\S+) "
            r"- val_accuracy: (\S+) - val_loss: (\S+)",
            process.stdout,
        )
        accuracy, loss, val_accuracy, val_loss = map(float, epoch)
        for share in (accuracy, val_accuracy):
            self.assertBetween(share, 0.0, 1.0)
        # Guessing is log(10) or log(4); one epoch does not go far from it.
        for value in (loss, val_loss):
            self.assertBetween(value, 0.5, 5.0)


if __name__ == "__main__":
    absltest.main()
