import os
import re

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tests.source_files import REPOSITORY

LLAMA = (
    "--flagfile=configs/finetune_causal_lm.flags",
    "--num_key_value_heads=1",
)
EPOCH = r"- loss: (\S+) - val_accuracy: (\S+) - val_loss: (\S+)"


class FinetuneCausalLmTest(parameterized.TestCase):
    def _losses(self, folder, *arguments, model=LLAMA):
        """Validation losses of a tiny run over the texts of a folder."""
        process = forked_python.run(
            [
                *("-m", "examples.finetune_causal_lm"),
                *model,
                f"--text_files={folder.full_path}/*.txt",
                *("--num_layers=1", "--width=16", "--hidden_width=32"),
                "--num_heads=2",
                *("--sequence_length=16", "--batch_size=8"),
                *("--steps_per_epoch=20", "--validation_steps=2"),
                *("--learning_rate=0.01", "--num_epochs=2"),
                *arguments,
            ],
            REPOSITORY,
        )
        self.assertEqual(process.returncode, 0, process.stderr)
        epochs = re.findall(EPOCH, process.stdout)
        self.assertLen(epochs, 2, process.stdout)
        return [float(loss) for _, _, loss in epochs], process.stdout

    def _texts(self):
        folder = self.create_tempdir()
        for index in range(3):
            folder.create_file(f"{index}.txt", "what comes next? " * 200)
        return folder

    @pytest.mark.crossing
    def test_another_family_over_both_axes(self):
        folder = self._texts()
        losses, output = self._losses(
            folder,
            *("--num_replicas=2", "--zero_stage=1"),
            f"--weights_file={folder.full_path}/model.weights.h5",
            model=("--family=gpt2", "--model_parallel=2"),
        )
        self.assertIn("on 2 model ranks", output)
        self.assertLess(losses[0], 5.0)
        self.assertLess(losses[1], losses[0] - 0.3)

    @pytest.mark.crossing
    def test_the_loss_falls_and_falls_on_from_weights_of_another_mesh(self):
        folder = self._texts()
        weights = os.path.join(folder.full_path, "model.weights.h5")
        first, output = self._losses(folder, f"--weights_file={weights}")
        self.assertIn("on 2 model ranks", output)
        # Guessing is log(256), or 5.5; the text has 12 letters in one order.
        self.assertLess(first[0], 5.0)
        self.assertLess(first[1], first[0] - 0.3)
        second, output = self._losses(
            folder,
            *("--model_parallel=1", f"--initial_weights={weights}"),
            f"--weights_file={folder.full_path}/later.weights.h5",
        )
        self.assertNotIn("model ranks", output)
        self.assertLess(second[0], first[1])


if __name__ == "__main__":
    absltest.main()
