import os
import re

import keras
import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tests.source_files import REPOSITORY


class TrainMultiWorkerTest(parameterized.TestCase):
    @parameterized.parameters((), ("--num_workers=1",))
    @pytest.mark.crossing
    def test_it_starts_workers_that_train_one_model(self, *flags):
        path = os.path.join(self.create_tempdir().full_path, "gpt.keras")
        said = forked_python.output(
            [
                # Without --num_replicas, as the documentation has it.
                *("-m", "examples.train_multi_worker"),
                *("--width=8", "--num_heads=2", "--sequence_length=8"),
                *("--num_blocks=1", "--batch_size=4", "--num_epochs=1"),
                "--steps_per_epoch=3",
                *("--validation_steps=1", f"--model_file={path}", *flags),
            ],
            REPOSITORY,
            timeout=300,
        )
        found = re.findall(r"loss: ([\d.]+) - val_loss: ([\d.]+)", said)
        self.assertLen(found, 1, said)
        # Guessing is log(256) = 5.5.
        for value in map(float, found[0]):
            self.assertBetween(value, 3.0, 8.0)
        self.assertIn("[worker 0] Saved", said)
        self.assertNotIn("is gone", said)
        keras.models.load_model(path)

    def test_workers_have_as_many_replicas_each(self):
        process = forked_python.run(
            [
                *("-m", "examples.train_multi_worker"),
                *("--num_replicas=3", "--num_workers=2", "--batch_size=6"),
            ],
            REPOSITORY,
        )
        self.assertNotEqual(process.returncode, 0)
        said = process.stdout + process.stderr
        self.assertIn("must be a multiple of --num_workers", said)


if __name__ == "__main__":
    absltest.main()
