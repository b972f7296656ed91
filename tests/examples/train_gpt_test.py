import os
import re
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from examples import gpt
from tests import forked_python
from tests.source_files import REPOSITORY

# What TensorFlow says before it has read which level is wanted.
NOTES_OF_TENSORFLOW = (
    r"WARNING: All log messages before absl::InitializeLog\(\)|I0000 .* "
    r"(oneDNN custom operations|Could not find cuda drivers)"
)
# Tables with what stands over and below them, and Keras' progress.
OWN_LINES = (
    r'$|[┏┃┡│├└ ]|(Pipeline|Sharding): "gpt"|Epoch \d/2$|\d+/20 '
    r"|Packed for \w+: \d+ documents into \d+ rows, \d+\.\d% used$"
    r"|Saved .*gpt.keras. A sample of it:$"
    r"|Tracing and compiling the first step of |No `mfu`: "
    r"|Devices wait for other stages |Steps wait for input "
)


# Measured are products of matrices, which take some seconds if they are large.
_WITH_SMALL_PRODUCTS = """
import runpy
from tfscale.mesh import timing

timing.WIDTHS["CPU"], timing.SECONDS = 128, 0.0
runpy.run_module("examples.train_gpt", run_name="__main__", alter_sys=True)
"""


class TrainGptTest(tf.test.TestCase, parameterized.TestCase):
    def _assert_is_quiet(self, output, errors):
        """Of 95 lines 63 were TensorFlow's, about sessions and strategies."""
        for line in errors.splitlines():
            self.assertRegex(line, NOTES_OF_TENSORFLOW)
        own, _, _ = output.partition(" A sample of it:")
        own = re.sub(r"\x1b\[[0-9;]*m|\x08", "", own)
        for line in re.split("[\r\n]+", f"{own} A sample of it:"):
            self.assertRegex(line, rf"^({OWN_LINES})")
        tables, _, _ = own.partition("Epoch 1/2")
        self.assertLessEqual(max(map(len, tables.splitlines())), 80)

    @parameterized.parameters(
        ("gpt_pipeline", True, False, "--num_microbatches=2"),
        ("gpt_tensor_parallel", False, True),
        ("gpt_3d", True, True, "--num_microbatches=2"),
        ("gpt_packed", True, False, "--num_microbatches=2"),
    )
    @pytest.mark.crossing(every=4)
    def test_it_learns_and_saves_a_plain_model(
        self, config, in_stages, sharded, *small
    ):
        packed = config == "gpt_packed"
        folder = self.create_tempdir()
        text = ("what comes next? " * 5 + "\n\n" * packed) * 40
        for index in range(3):
            folder.create_file(f"{index}.txt", text)
        model_file = os.path.join(folder.full_path, "gpt.keras")
        process = subprocess.run(
            [
                sys.executable,
                *("-m", "examples.train_gpt"),
                f"--flagfile=configs/{config}.flags",
                f"--text_files={folder.full_path}/*.txt",
                *("--num_blocks=1", "--width=16", "--num_heads=2"),
                *("--sequence_length=16", "--batch_size=8"),
                *("--learning_rate=0.03", *small),
                *("--num_epochs=2", "--steps_per_epoch=20"),
                *(
                    "--validation_steps=2",
                    "--prompt=what ",
                    "--sample_length=4",
                ),
                f"--model_file={model_file}",
            ],
            capture_output=True,
            cwd=REPOSITORY,
            env={
                "CUDA_VISIBLE_DEVICES": "-1",
                # As users have it: without the level that tests have.
                **{k: v for k, v in os.environ.items() if "LOG_LEVEL" not in k},
            },
            text=True,
        )
        self.assertEqual(process.returncode, 0, process.stderr)
        self._assert_is_quiet(process.stdout, process.stderr)
        for text, printed in (
            ('Pipeline: "gpt"', in_stages),
            ("Predicted speed-up", in_stages),
            ("No `mfu`", True),
            ('Sharding: "gpt" on 2 model ranks', sharded),
            # Each document of 85 bytes takes five rows of 16 and a part.
            ("Packed for training: 80 documents into", packed),
        ):
            self.assertEqual(text in process.stdout, printed, process.stdout)
        self.assertRegex(process.stdout, r"A sample of it:\s+what .{4}")
        # An epoch that is short tells its speed behind the validation.
        epochs = [
            [logs["loss"], logs["tokens_per_second"], logs["val_loss"]]
            for line in re.split("[\r\n]+", process.stdout)
            if "val_loss"
            in (logs := dict(re.findall(r" - (\w+): (\S+)", line)))
        ]
        losses, rates, validation_losses = np.array(epochs, float).T
        self.assertLen(losses, 2)
        self.assertAllGreater(rates, 0.0)
        # Guessing is log(256), or 5.5; the text has 12 letters in one order.
        self.assertLess(losses[1], losses[0] - 1.0)
        self.assertLess(validation_losses[1], 2.0)

        with zipfile.ZipFile(model_file) as file:
            config = file.read("config.json").decode()
        self.assertNotIn("tfscale", config)
        loaded = keras.models.load_model(model_file)
        tokens = np.frombuffer(b"what comes next?", "uint8")[None].astype(int)
        logits = loaded.predict_on_batch(
            gpt.as_one_document(tokens) if packed else tokens
        )
        loss = keras.losses.sparse_categorical_crossentropy(
            tokens[:, 1:], logits[:, :-1], from_logits=True
        )
        # What was saved is what was trained.
        self.assertLess(float(keras.ops.mean(loss)), 2.0)

    @pytest.mark.crossing
    def test_the_mesh_can_be_planned(self):
        folder = self.create_tempdir()
        for index in range(2):
            folder.create_file(f"{index}.txt", "what comes next? " * 40)
        model_file = os.path.join(folder.full_path, "gpt.keras")
        process = forked_python.run(
            [
                *("-c", _WITH_SMALL_PRODUCTS, "--mesh=auto"),
                f"--text_files={folder.full_path}/*.txt",
                *("--num_blocks=1", "--width=16", "--num_heads=2"),
                *("--sequence_length=8", "--batch_size=4", "--num_epochs=1"),
                *("--steps_per_epoch=2", "--validation_steps=1"),
                *("--sample_length=1", f"--model_file={model_file}"),
            ],
            REPOSITORY,
        )
        self.assertEqual(process.returncode, 0, process.stderr)
        self.assertIn("Plans: gpt with", process.stdout)
        self.assertIn("Saved ", process.stdout)


if __name__ == "__main__":
    absltest.main()
