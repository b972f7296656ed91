"""Data whose length nobody knows: no batch too many is counted, none is lost.

At the end of it Keras takes one batch more, which is not there. Where shapes
are static, metrics counted it and the optimizer made a step number of it: a
loss was three quarters of what it was. A generator began with a later batch,
since Keras had looked at the first one, and TensorFlow read on for that.
"""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers

RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(24, 3)).astype("float32")
Y = RANDOM.normal(size=(24, 1)).astype("float32")


def batches(count=3, first=0):
    for i in range(first, first + count):
        # TensorFlow may compute in the memory of an array that it is given.
        yield X[i * 4 : i * 4 + 4].copy(), Y[i * 4 : i * 4 + 4].copy()


def dataset(size):
    return tf.data.Dataset.from_generator(
        batches,
        output_signature=(
            tf.TensorSpec((size, 3)),
            tf.TensorSpec((size, 1)),
        ),
    )


def build(microbatches=None, **axes):
    same_numbers.reset()
    scope = contextlib.nullcontext()
    if axes:
        scope = tfscale.MeshStrategy(tfscale.device_mesh(**axes)).scope()
    with scope:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        if microbatches:
            model = tfscale.PipelineModel(model, microbatches)
        model.compile("sgd", "mse", metrics=["mae"], run_eagerly=not axes)
    return model


class EndOfDataTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        # It is how Keras learns the length.
        self.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Your input ran out of data")

    @parameterized.parameters(
        (lambda: dataset(4), dict(data=1)),
        (lambda: dataset(4), dict(data=2)),
        (lambda: dataset(4), dict(data=2, microbatches=2)),
        (batches, dict(data=2)),
    )
    @pytest.mark.crossing(every=4)
    def test_counts_what_there_is(self, data, axes):
        model, expected = build(**axes), build()
        logs = model.fit(data(), verbose=0).history
        same = expected.fit(
            X[:12], Y[:12], batch_size=4, shuffle=False, verbose=0
        )
        self.assertEqual(model.optimizer.iterations.numpy(), 3)
        for name, values in same.history.items():
            np.testing.assert_allclose(logs[name], values, rtol=1e-5)
        for one, other in zip(model.get_weights(), expected.get_weights()):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
        found = model.evaluate(data(), verbose=0)
        same = expected.evaluate(X[:12], Y[:12], batch_size=4, verbose=0)
        np.testing.assert_allclose(found, same, rtol=1e-5)

    def test_a_generator_of_several_epochs_and_one_of_validation(self):
        logs = [
            model.fit(
                batches(6),
                steps_per_epoch=3,
                epochs=2,
                validation_data=batches(2),
                verbose=0,
            ).history
            for model in (build(), build(data=2))
        ]
        for name, values in logs[0].items():
            np.testing.assert_allclose(logs[1][name], values, rtol=1e-5)


if __name__ == "__main__":
    tf.test.main()
