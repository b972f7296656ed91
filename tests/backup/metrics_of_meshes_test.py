"""A run that goes on in mid-epoch on another mesh logs what it would have.

Metrics were added up over devices, of which model ranks have copies of one sum:
from two ranks the loss of that epoch was twice what it was until then. And two
replicas were taken for two ranks: what the second one had seen was lost.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.interruption import Interrupt
from tests.interruption import Interrupted
from tfscale.callbacks import BackupAndRestore

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
MESHES = (
    {},
    dict(data=2),
    dict(model=2),
    dict(data=2, model=2),
    dict(pipeline=2),
)
LAYOUTS = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}


def history(axes, *callbacks):
    same_numbers.reset()
    mesh = tfscale.device_mesh(**axes)
    layouts = LAYOUTS if "model" in axes else None
    with tfscale.MeshStrategy(mesh, layouts).scope():
        up = keras.layers.Dense(4, "tanh", name="up")
        down = keras.layers.Dense(1, name="down")
        model = keras.Sequential([keras.Input((4,)), up, down])
        if "pipeline" in axes:
            model = tfscale.PipelineModel(model, 2, balance="params")
        model.compile("sgd", "mse", metrics=["mae"])
    return model.fit(
        *(X, X[:, :1] * 9),
        batch_size=8,
        verbose=0,
        shuffle=False,
        callbacks=list(callbacks),
    ).history


class MetricsOfMeshesTest(parameterized.TestCase):
    @parameterized.parameters(
        *(
            pair
            for pair in itertools.permutations(MESHES, 2)
            if any("model" in axes for axes in pair)
        )
    )
    @pytest.mark.crossing(every=14)
    def test_an_epoch_has_the_metrics_of_one_run(self, before, after):
        folder = self.create_tempdir().full_path
        with self.assertRaises(Interrupted):
            history(before, BackupAndRestore(folder, save_freq=2), Interrupt(6))
        again = BackupAndRestore(folder, save_freq=2), Interrupt(None)
        found = history(after, *again)
        for name, value in history({}).items():
            same_numbers.assert_close(found[name], value, name)


if __name__ == "__main__":
    tf.test.main()
