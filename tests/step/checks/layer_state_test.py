"""What a layer keeps of what its calls see is warned of, in parts of a batch.

Only pipelines said it. Replicas and `GradientAccumulation` gave other running
means than one device without a word.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import ops

import tfscale
from tests import same_numbers

X = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")


class RunningMean(keras.layers.Layer):
    aggregation = "none"

    def build(self, input_shape):
        self.mean = self.add_weight(
            shape=(input_shape[-1],),
            initializer="zeros",
            trainable=False,
            aggregation=self.aggregation,
            name="mean",
        )

    def call(self, inputs, training=None):
        if training:
            seen = self.of_batch(ops.mean(inputs, axis=0))
            self.mean.assign(0.9 * self.mean + 0.1 * seen)
        return inputs - self.mean

    def of_batch(self, mean):
        return mean


class InBranch(RunningMean):
    def call(self, inputs, training=None):
        assigned = super().call
        return tf.cond(
            tf.reduce_all(inputs < 1e6),
            lambda: assigned(inputs, training=training),
            lambda: inputs,
        )


class RowCounter(keras.layers.Layer):
    def build(self, input_shape):
        self.rows = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="rows"
        )

    def call(self, inputs):
        # A constant, where a batch has a known size.
        self.rows.assign_add(inputs.shape[0] or ops.shape(inputs)[0])
        return inputs


class Aggregated(RunningMean):
    aggregation = "mean"


class Reduced(RunningMean):
    def of_batch(self, mean):
        replica = tf.distribute.get_replica_context()
        return mean if replica is None else replica.all_reduce("MEAN", mean)


class CallCounter(keras.layers.Layer):
    def build(self, input_shape):
        self.calls = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="calls"
        )

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs


class Normed(keras.layers.Wrapper):
    """Divides by a norm of a kernel that it keeps."""

    def __init__(self):
        super().__init__(keras.layers.Dense(6))

    def build(self, input_shape):
        super().build(input_shape)
        self.norm = self.add_weight(shape=(), trainable=False, name="norm")

    def call(self, inputs):
        self.norm.assign(ops.sqrt(ops.sum(self.layer.kernel**2)))
        return self.layer(inputs) / self.norm


class OwnBatchNorm(keras.layers.BatchNormalization):
    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training, mask)


class OfTensorFlow(keras.layers.Layer):
    """Keeps a mean in a variable that Keras does not know."""

    def build(self, input_shape):
        self.held = tf.Variable(0.0, trainable=False, name="held")

    def call(self, inputs):
        self.held.assign_add(ops.mean(inputs))
        return inputs


class OwnLoss(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.held = tf.Variable(0.0, trainable=False, name="of_loss")

    def call(self, y_true, y_pred):
        self.held.assign(ops.mean(y_true))
        return ops.mean((y_true - y_pred) ** 2, axis=-1) + self.held


def of_keras():
    return keras.Sequential(
        [
            keras.layers.Dense(6),
            keras.layers.BatchNormalization(),
            OwnBatchNorm(),
            keras.layers.Dropout(0.5),
        ]
    )


def fit(make_layer, data=1, accumulated=None, stages=1, loss=lambda: "mse"):
    """Trains twice, and returns what is kept and what is warned of."""
    same_numbers.reset()
    callbacks = []
    if accumulated:
        callbacks = [tfscale.callbacks.GradientAccumulation(accumulated)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mesh = tfscale.device_mesh(data=data, pipeline=stages)
        with tfscale.MeshStrategy(mesh).scope():
            layer = make_layer()
            model = keras.Sequential([keras.Input((6,)), layer])
            model.add(keras.layers.Dense(6))
            if stages > 1:
                model = tfscale.PipelineModel(model, num_microbatches=4)
            model.compile("sgd", loss(), metrics=["mae"])
        for _ in range(2):
            model.fit(
                *(X, X),
                batch_size=8,
                shuffle=False,
                verbose=0,
                callbacks=callbacks,
            )
    kept = [np.array(v) for v in layer.non_trainable_weights]
    return kept, [str(w.message) for w in said if w.category is UserWarning]


class OwnStateTest(parameterized.TestCase):
    def test_a_running_mean_is_warned_of_once_on_replicas(self):
        _, (said,) = fit(RunningMean, data=2)
        self.assertRegex(said, "rows of one replica.*running_mean/mean'")

    def test_in_a_branch_it_is_warned_of_too(self):
        _, (said,) = fit(InBranch, data=2)
        self.assertRegex(said, "rows of one replica.*/mean'")

    def test_a_counter_of_a_known_number_of_rows_is_warned_of(self):
        same_numbers.reset()
        with tfscale.MeshStrategy(tfscale.device_mesh(data=2)).scope():
            inputs = keras.Input(batch_shape=(8, 6))
            model = keras.Sequential([inputs, RowCounter(), CallCounter()])
            model.compile("sgd", "mse")
        data = tf.data.Dataset.from_tensor_slices((X, X))
        with self.assertWarnsRegex(UserWarning, "rows of one.*/rows', to"):
            model.fit(data.batch(8, drop_remainder=True), verbose=0)

    @parameterized.parameters(
        (dict(data=2), "rows of one replica"),
        (dict(accumulated=4), "once per microbatch, .*by a trial"),
        (dict(stages=2), "once per microbatch, "),
    )
    @pytest.mark.crossing(every=3)
    def test_variables_of_tensorflow_are_warned_of_too(self, options, words):
        # Those of a layer, of a loss and globals changed without a word.
        _, (said,) = fit(OfTensorFlow, **options)
        self.assertRegex(said, f"{words}.*")
        self.assertRegex(said, "'.*held[:0]*'")
        _, (said,) = fit(lambda: keras.layers.Dense(6), loss=OwnLoss, **options)
        self.assertRegex(said, "'.*of_loss[:0]*'")

    @parameterized.parameters(RunningMean, CallCounter, Normed)
    @pytest.mark.crossing(every=3)
    def test_each_change_is_warned_of_once_in_microbatches(self, kind):
        _, (said,) = fit(kind, accumulated=4)
        self.assertRegex(said, "once per microbatch, .*/(mean|calls|norm)'")

    @parameterized.parameters(Aggregated, Reduced)
    def test_what_is_put_together_is_that_of_one_device(self, kind):
        (expected,), _ = fit(kind)
        (found,), said = fit(kind, data=2)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        self.assertEqual(said, [])

    @parameterized.parameters(
        (RunningMean,),
        (RunningMean, 1, 1),
        (CallCounter, 2),
        (Normed, 2),
        (of_keras, 2),
        (of_keras, 1, 4),
    )
    @pytest.mark.crossing(every=3)
    def test_what_is_right_is_not_warned_of(self, *arguments):
        self.assertEqual(fit(*arguments)[1], [])


if __name__ == "__main__":
    tf.test.main()
