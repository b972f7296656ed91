"""Moving statistics on replicas: those of the whole batch, and the same ones.

They drifted apart once, those of the first replica were saved, and a replica
without rows (of 33 in batches of 16 the last leaves one) made them NaN.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers

RANDOM = np.random.RandomState(0)
X = RANDOM.normal(3.0, 2.0, (33, 4, 6)).astype("float32")
# Zeros at the end are masked: few elements in the first rows of each batch.
X[np.arange(4) >= np.where(np.arange(33) % 16 < 8, 1, 4)[:, None]] = 0.0
Y = RANDOM.normal(size=(33, 6)).astype("float32")
DATA = dict(x=X, y=Y, batch_size=16)
LAYOUTS = {
    "a/kernel": (None, "model"),
    "features/.*": ("model",),
    "b/kernel": ("model", None),
}


def norm(name, **options):
    return keras.layers.BatchNormalization(
        momentum=0.8, epsilon=0.1, name=name, **options
    )


def side_by_side():
    """Statistics of what no normalization has changed, of many kinds."""
    inputs = keras.Input((4, 6))
    pooled = keras.layers.GlobalAveragePooling1D()(inputs)
    shared = norm("shared")
    outputs = [
        shared(pooled),
        shared(keras.layers.GlobalMaxPooling1D()(inputs)),
        norm("renormalized", renorm=True)(inputs),
        norm("masked")(keras.layers.Masking()(inputs)),
        norm("frozen", trainable=False)(inputs),
        norm("features")(keras.layers.Dense(6, name="a")(inputs)),
    ]
    outputs[-1] = keras.layers.Dense(6, name="b")(outputs[-1])
    outputs = [
        x if len(x.shape) == 2 else keras.layers.GlobalAveragePooling1D()(x)
        for x in map(keras.layers.Identity(), outputs)
    ]
    return keras.Model(inputs, keras.layers.Add()(outputs))


def synchronized():
    inputs = keras.Input((4, 6))
    x = keras.layers.Dense(5, use_bias=False, name="a")(
        keras.layers.Masking()(inputs)
    )
    x = norm("masked", synchronized=True)(x)
    x = keras.layers.Flatten()(keras.ops.tanh(x))
    x = keras.layers.Dense(6, use_bias=False, name="b")(x)
    x = norm("plain", synchronized=True)(x)
    return keras.Model(inputs, keras.layers.Dense(6, name="c")(x))


def of_threes():
    inputs = keras.Input((6,))
    a, b = (
        keras.layers.Dense(
            6, use_bias=False, kernel_initializer="identity", name=name
        )
        for name in ("a", "b")
    )
    norm = keras.layers.BatchNormalization(name="features", dtype="bfloat16")
    return keras.Model(inputs, b(norm(a(inputs))))


OF_THREES = same_numbers.Job(
    of_threes,
    dict(x=np.full((480, 6), 3.0), y=np.zeros((480, 6)), batch_size=8),
    lambda: keras.optimizers.SGD(0.0),
)


@functools.cache
def of_threes_on_one_device():
    return same_numbers.on_one_device(OF_THREES)


class FitTest(parameterized.TestCase):
    @parameterized.parameters(1, 2)
    @pytest.mark.crossing(every=2)
    def test_statistics_are_those_of_the_batch(self, num_ranks):
        job = same_numbers.Job(
            side_by_side, DATA, lambda: keras.optimizers.SGD(0.0)
        )
        expected = same_numbers.on_one_device(job)
        actual = same_numbers.on_ranks(
            job, num_ranks, 2, layouts=LAYOUTS if num_ranks > 1 else {}
        )
        for path, value in expected.variables.items():
            same_numbers.assert_close(actual.variables[path], value, path)
        for variable in actual.model.non_trainable_variables:
            parts = [np.array(x) for x in variable.value.values]
            half = parts[: len(parts) // 2]
            np.testing.assert_array_equal(half, parts[len(parts) // 2 :])

    @parameterized.parameters((2, 1), (1, 2))
    @pytest.mark.crossing
    def test_statistics_in_bfloat16(self, num_replicas, num_ranks):
        # There a momentum of 0.99 is 0.988, by which averages went astray;
        # those of shards could not be assigned.
        layouts = LAYOUTS if num_ranks > 1 else {}
        expected = of_threes_on_one_device()
        actual = same_numbers.on_ranks(
            OF_THREES, num_ranks, num_replicas, layouts
        )
        for path, value in expected.variables.items():
            same_numbers.assert_close(actual.variables[path], value, path)
        self.assertGreater(expected.variables["features/moving_mean"].max(), 1)

    def test_synchronized_is_as_on_one_device(self):
        job = same_numbers.Job(synchronized, DATA)
        expected = same_numbers.on_one_device(job)
        actual = same_numbers.on_ranks(job, 1, 2, layouts={})
        same_numbers.assert_same(self, expected, actual)


class LoopByHandTest(parameterized.TestCase):
    def test_statistics_of_a_step_without_gradients(self):
        layers = [norm("n")]
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=2))
        with strategy.scope():
            layers.append(norm("n"))
            layers[1].build((None, 4, 6))
        layers[0](X, training=True)

        @tf.function(autograph=False)
        def step(rows):
            strategy.run(lambda x: layers[1](x, training=True), args=(rows,))

        rows = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                X[:5] if context.replica_id_in_sync_group else X[5:]
            )
        )
        step(rows)
        for expected, actual in zip(layers[0].weights, layers[1].weights):
            same_numbers.assert_close(actual, expected, expected.path)
