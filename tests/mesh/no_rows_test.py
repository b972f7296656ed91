"""Replicas without rows: a last batch of fewer rows than there are replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers

layers = keras.layers
RANDOM = np.random.RandomState(0)
# Of the last batch replicas have 2 and 0, or 2, 2 and 0 rows.
BATCH_SIZES = {2: 4, 3: 6}
X, Y = RANDOM.normal(size=(10, 4, 4, 2)), RANDOM.normal(size=(10, 1))


def convolutions():
    """A branch for each, so that one trace is enough."""
    images = keras.Input(X.shape[1:])
    lines = layers.Reshape((8, 4))(images)
    films = layers.Reshape((2, 2, 2, 4))(images)
    branches = [
        layers.LayerNormalization(name="norm")(
            layers.Conv2D(3, 3, name="plain")(images)
        ),
        layers.Conv2DTranspose(3, 3, name="transposed")(images),
        layers.DepthwiseConv2D(3, name="depthwise")(images),
        layers.Conv1D(3, 3, padding="causal", name="causal")(lines),
        layers.ConvLSTM2D(2, 2, name="lstm")(films),
        layers.MaxPooling1D()(layers.Conv1D(3, 1, name="line")(lines)),
        layers.MaxPooling2D()(layers.Conv2D(3, 1, name="image")(images)),
        # TensorFlow has no maximum of films in float64, on one device either.
        layers.MaxPooling3D(dtype="float32")(
            layers.Conv3D(3, 1, name="film")(films)
        ),
    ]
    means = [keras.ops.mean(keras.ops.tanh(x), -1) for x in branches]
    flat = [layers.Flatten()(x) for x in means]
    x = layers.Concatenate()(flat)
    return keras.Model(images, layers.Dense(1, name="last")(x))


class Centered(layers.Layer):
    """Less the mean of all replicas' rows, as docs/numbers.md has it."""

    def __init__(self):
        super().__init__()
        self.largest = keras.metrics.Mean(name="largest")

    def call(self, x):
        # A row of zeros has no direction.
        x /= keras.ops.sqrt(keras.ops.sum(x**2, axis=-1, keepdims=True))
        self.largest.update_state(keras.ops.max(x, axis=-1))
        sums = keras.ops.sum(x, axis=0), keras.ops.shape(x)[0]
        context = tf.distribute.get_replica_context()
        if context is not None:
            sums = [context.all_reduce("sum", each) for each in sums]
        return x - sums[0] / keras.ops.cast(sums[1], x.dtype)


class NumberOfRows(keras.metrics.Sum):
    def update_state(self, y, y_pred, sample_weight=None):
        super().update_state(keras.ops.ones(keras.ops.shape(y)[:1]))


def centered():
    images = keras.Input(X.shape[1:])
    x = layers.Flatten()(images)
    x = layers.Dense(3, use_bias=False, name="first")(x)
    return keras.Model(images, layers.Dense(1, name="last")(Centered()(x)))


class NoRowsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        before = keras.config.floatx(), keras.config.dtype_policy()
        self.addCleanup(keras.config.set_dtype_policy, before[1])
        self.addCleanup(keras.config.set_floatx, before[0])

    @parameterized.product(dtype=("float32", "float64"), data=(2, 3))
    @pytest.mark.crossing(every=4)
    def test_convolutions(self, dtype, data):
        # oneDNN gave the shape of the inputs: "Incompatible shapes". The
        # gradient of a depthwise kernel in float64 was what lay in memory. The
        # gradient of a maximum ended the process: "int32 expected, got float".
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)
        job = same_numbers.Job(
            convolutions,
            dict(x=X.astype(dtype), y=Y.astype(dtype)),
            fit=dict(batch_size=BATCH_SIZES[data]),
        )
        expected = same_numbers.on_one_device(job)
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=data))
        found = same_numbers.plain(job, strategy)
        same_numbers.assert_same(self, expected, found)
        same_numbers.assert_close(
            found.model.evaluate(X[:1], Y[:1], verbose=0),
            expected.model.evaluate(X[:1], Y[:1], verbose=0),
        )

    def test_what_a_user_computes_sees_no_row_more(self):
        # Not even one that counts nothing in losses: sums over replicas and
        # numbers of rows had it, and its gradient was NaN.
        job = same_numbers.Job(
            centered,
            dict(x=X, y=Y),
            compile=lambda: dict(metrics=[NumberOfRows(name="rows")]),
            fit=dict(batch_size=6, validation_data=(X[:7], Y[:7])),
        )
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=3))
        same_numbers.assert_same(
            self,
            same_numbers.on_one_device(job),
            same_numbers.plain(job, strategy),
        )

    @parameterized.parameters(2, 3)
    @pytest.mark.crossing(every=2)
    def test_convolutions_predict(self, most):
        # The shape of the inputs again: "Matrix size-incompatible".
        predictions = []
        for data in (1, most):
            same_numbers.reset()
            strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=data))
            with strategy.scope():
                images = keras.Input(X.shape[1:])
                means = layers.GlobalAveragePooling2D()(
                    layers.Conv2D(3, 3)(images)
                )
                model = keras.Model(images, layers.Dense(1)(means))
            predictions.append(
                model.predict(X, batch_size=BATCH_SIZES[most], verbose=0)
            )
        same_numbers.assert_close(*predictions)
