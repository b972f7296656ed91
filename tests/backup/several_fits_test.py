"""A program with several calls of `fit` and one folder ends as if not killed.

The first `fit` after a restart took the backup of the second one for its own:
72 steps were made for 48, on other data.
"""

import functools
import json
import signal

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tests.source_files import REPOSITORY

_PROGRAM = """
import json
import os
import signal
import sys

import keras
import numpy as np

import tfscale
from tfscale import data

folder, kind, kill = json.load(sys.stdin)
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
y = x.sum(1, keepdims=True)
steps = []  # of each `fit`


class Kill(keras.callbacks.Callback):
    def get_state(self):
        return {}

    def set_state(self, state):
        pass

    def on_train_batch_end(self, batch, logs=None):
        steps[-1] += 1
        if [len(steps), steps[-1]] == kill:
            os.kill(os.getpid(), signal.SIGKILL)


def compiled():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    return model


model = compiled()
found = []
for part in range(3):
    steps.append(0)
    if kind == "folds":  # of models that begin alike
        keras.utils.set_random_seed(0)
        model = compiled()
    rows = np.roll(x, part, 0), np.roll(y * part, part, 0)
    if kind == "pipelines":
        rows = (data.pipeline(data.arrays(*rows), batch_size=8),)
        options = {}
    else:
        options = {"batch_size": 8}
    backup = tfscale.callbacks.BackupAndRestore(
        os.path.relpath(folder) if part % 2 else folder, save_freq=2
    )
    model.fit(*rows, epochs=2, verbose=0, callbacks=[backup, Kill()], **options)
    found.append([w.tolist() for w in model.get_weights()])
print("RESULT", json.dumps([steps, found, os.listdir(folder)]))
"""


def run(*arguments):
    """The result of the program, or None if it was killed."""
    process = forked_python.run(
        ["-c", _PROGRAM], REPOSITORY, input=json.dumps(arguments)
    )
    if process.returncode == -signal.SIGKILL:
        return None
    (line,) = [
        line
        for line in process.stdout.splitlines()
        if line.startswith("RESULT ")
    ]
    return json.loads(line[7:])


class SeveralFitsTest(parameterized.TestCase):
    @parameterized.parameters("one model", "folds", "pipelines")
    @pytest.mark.crossing(every=3)
    def test_each_goes_on_from_its_own_backup(self, kind):
        # A restart makes the steps of earlier ones again.
        folder = self.create_tempdir().full_path
        steps, expected, left = run(f"{folder}/whole", kind, None)
        self.assertEqual((steps, left), ([8, 8, 8], []))
        start = functools.partial(run, f"{folder}/killed", kind)
        for kill in ((1, 6), (2, 5), (1, 3), (2, 2), (3, 6)):
            self.assertIsNone(start(kill))
        steps, found, left = start(None)
        self.assertEqual(found, expected)
        self.assertEqual(left, [])
        # The third had saved two or four of its steps.
        self.assertEqual(steps[:2], [8, 8])
        self.assertLess(steps[2], 8)


if __name__ == "__main__":
    absltest.main()
