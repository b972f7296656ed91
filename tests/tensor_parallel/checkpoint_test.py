"""What is saved on one mesh is loaded on any other, and by plain Keras."""

import contextlib
import functools
import os
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.tensor_parallel import same_numbers_test

SIZES = same_numbers_test.SIZES
PLAIN = (1, 1)
ALL = (*SIZES, PLAIN)
GOES_ON = tuple(zip(ALL, (*ALL[1:], ALL[0])))
X = np.random.RandomState(0).randn(16, 12).astype("float32")


def scope_of(size):
    """A scope for (data, model), with names that start anew."""
    same_numbers.reset()
    if size == PLAIN:
        return contextlib.nullcontext()
    mesh = tfscale.device_mesh(data=size[0], model=size[1])
    layout_map = tfscale.auto_layout_map(same_numbers_test.mlp(), mesh)
    keras.utils.clear_session(free_memory=False)
    return tfscale.MeshStrategy(mesh, layout_map).scope()


def values(model):
    return [np.array(v) for v in model.variables + model.optimizer.variables]


def next_loss(model):
    return model.fit(X, X, batch_size=16, verbose=0).history["loss"][0]


@functools.cache
def saved(size):
    """A file of a model that was trained there, its values, the next loss."""
    with scope_of(size):
        model = same_numbers_test.mlp()
        model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(X, X, batch_size=16, epochs=2, verbose=0)
    path = os.path.join(tempfile.mkdtemp(), "model.keras")
    model.save(path)
    return path, values(model), next_loss(model)


class CheckpointTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(source=ALL, target=ALL)
    @pytest.mark.crossing(every=16)
    def test_is_loaded_on(self, source, target):
        path, expected, loss = saved(source)
        with scope_of(target):
            model = keras.models.load_model(path)
        for value, found in zip(expected, values(model), strict=True):
            np.testing.assert_array_equal(found, value)
        if target != PLAIN:
            kernels = [v for v in model.variables if "kernel" in v.path]
            slots = [v for v in model.optimizer.variables if "kernel" in v.path]
            self.assertLen(slots, 2 * len(kernels))
            for variable in (*kernels, *slots):
                self.assertIsNotNone(variable.value.sharding.model_dim)
        # To trace a step takes longest: of all that is loaded onto one mesh,
        # which is equal to the last bit, one goes on.
        if (source, target) in GOES_ON:
            same_numbers.assert_close(next_loss(model), loss)


if __name__ == "__main__":
    tf.test.main()
