"""The GPT under the launcher, by the flag files for several processes."""

import os
import re

import keras
import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tests.source_files import REPOSITORY


class LaunchedGptTest(parameterized.TestCase):
    @parameterized.parameters(
        # A stage on each of two processes.
        ("gpt_coordinator", "worker", 2, "--num_microbatches=2"),
        ("gpt_parameter_server", "chief", 1, "--num_ps=1"),
    )
    @pytest.mark.crossing
    def test_it_learns_and_saves_a_plain_model(
        self, config, first, num_workers, flag
    ):
        folder = self.create_tempdir()
        for index in range(2):
            folder.create_file(f"{index}.txt", "what comes next? " * 200)
        path = os.path.join(folder.full_path, "gpt.keras")
        launcher = [f"--num_workers={num_workers}", "--devices_per_worker=1"]
        own = ["--balance=params"]
        (launcher if flag.startswith("--num_ps") else own).append(flag)
        said = forked_python.output(
            [
                *("-m", "tfscale.launch", *launcher, "-m"),
                *("examples.train_gpt", f"--flagfile=configs/{config}.flags"),
                f"--text_files={folder.full_path}/*.txt",
                *("--num_blocks=1", "--width=8", "--num_heads=2", *own),
                *("--sequence_length=8", "--batch_size=4", "--num_epochs=1"),
                *("--steps_per_epoch=4", "--validation_steps=1"),
                *("--prompt=what ", "--sample_length=1"),
                f"--model_file={path}",
            ],
            cwd=REPOSITORY,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
            timeout=300,
        )
        found = re.findall(r"- loss: ([\d.]+) .*- val_loss: ([\d.]+)", said)
        # One process runs the program, the first.
        self.assertLen(found, 1, said)
        self.assertIn(f"[{first} 0] Saved", said)
        # Guessing is log(256) = 5.5.
        for value in map(float, found[0]):
            self.assertBetween(value, 3.0, 8.0)
        keras.models.load_model(path)


if __name__ == "__main__":
    absltest.main()
