"""Steps that Keras gives a batch as it is, or that a model has of its own."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tfscale
from tests import same_numbers

RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(5, 4)).astype("float32")
Y = RANDOM.randint(0, 2, (5, 1)).astype("float32")


class Own(keras.Sequential):
    """Its step divides by what Keras does not know of, or by nothing."""

    divides = True

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            if self.divides:
                strategy = tf.distribute.get_strategy()
                loss /= strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


class Parts(keras.Model):
    def __init__(self, layers):
        super().__init__()
        self.part = keras.Sequential(layers)

    def compile(self, optimizer, loss, metrics):
        super().compile(optimizer)

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = keras.losses.BinaryCrossentropy()(y, self.part(x))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def true_positives():
    return keras.metrics.TruePositives(name="true")


class Rows(keras.metrics.Metric):
    """Counts rows, and returns the variable in which it does."""

    def __init__(self):
        super().__init__(name="rows")
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign_add(tf.cast(tf.shape(y_true)[0], "float32"))

    def result(self):
        return self.rows


def build(
    kind=keras.Sequential,
    data=None,
    metrics=list,
    loss="binary_crossentropy",
    wrap=lambda model: model,
):
    same_numbers.reset()
    scope = contextlib.nullcontext()
    if data:
        scope = tfscale.MeshStrategy(tfscale.device_mesh(data=data)).scope()
    with scope:
        model = kind([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
        if data:
            model = wrap(model)
        model.compile("sgd", loss, metrics=metrics())
    return model


def on_batches(**axes):
    """What the methods return for 5 rows, and for fewer than replicas."""
    model = build(**axes, metrics=lambda: [true_positives(), Rows()])
    return [
        model.train_on_batch(X, Y, return_dict=True),
        # All replicas had counted, and outside it was the sum.
        {name: x + 0.0 for name, x in model.get_metrics_result().items()},
        model.test_on_batch(X[:1], Y[:1], return_dict=True),
        model.predict_on_batch(X),
        model.predict_on_batch(X[:1]),
    ]


def pipeline(model):
    return tfscale.PipelineModel(model, num_microbatches=2)


class OnBatchTest(parameterized.TestCase):
    def test_is_as_on_one_device(self):
        # All replicas take the whole batch, and predictions came once for each.
        for expected, actual in zip(
            keras.tree.flatten(on_batches()),
            keras.tree.flatten(on_batches(data=2)),
            strict=True,
        ):
            self.assertEqual(np.shape(actual), np.shape(expected))
            same_numbers.assert_close(actual, expected)

    @parameterized.product(
        reduction=("sum", "none", "mean"), wrap=(lambda model: model, pipeline)
    )
    @pytest.mark.crossing(every=6)
    def test_a_sum_over_rows_counts_once(self, reduction, wrap):
        # It counted once for each replica, in the loss and in the gradient.
        found = []
        for data in (None, 2):
            loss = keras.losses.MeanSquaredError(reduction=reduction)
            model = build(data=data, loss=loss, wrap=wrap)
            losses = [
                model.train_on_batch(X, Y),
                model.test_on_batch(X[:1], Y[:1]),
            ]
            found.append([*losses, *model.get_weights()])
        for expected, actual in zip(*found, strict=True):
            same_numbers.assert_close(actual, expected)

    def test_a_batch_may_be_an_argument_by_name(self):
        # It was taken for one that all replicas have: the first one's rows
        # were all that metrics counted.
        model = build(data=2)
        strategy = model.distribute_strategy
        batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
        (batch,) = strategy.experimental_distribute_dataset(batches.take(1))
        step = tf.function(
            lambda data: strategy.run(model.test_step, kwargs={"data": data})
        )
        step(batch)
        expected = build().test_on_batch(X[:4], Y[:4])
        actual = model.get_metrics_result()["loss"]
        same_numbers.assert_close(actual, expected)

    def test_a_metric_that_was_made_outside_is_refused(self):
        # Replicas counted in one variable, one before the other: a TruePositive
        # was 1.5.
        metric = true_positives()
        model = build(data=2, metrics=lambda: [metric])
        with self.assertRaisesRegex(ValueError, "'true/.*outside"):
            model.train_on_batch(X, Y)


class OwnStepTest(absltest.TestCase):
    def test_a_mean_counts_by_rows(self):
        # Gradients were as many times too large as there were replicas.
        weights = []
        for data in (None, 2):
            model = build(Own, data=data)
            model.run_eagerly = True
            model.train_on_batch(X, Y)  # divides by 1
            model.divides = False
            model.train_on_batch(X, Y)
            weights.append(model.get_weights()[0])
        same_numbers.assert_close(weights[1], weights[0])

    def test_a_model_without_a_call_trains(self):
        # Keras called it to build it, as it does under any strategy.
        x = X[:4]  # parts of equal size
        weights = []
        for data in (None, 2):
            model = build(Parts, data=data)
            model.fit(x, Y[:4], verbose=0)
            model.train_on_batch(x, Y[:4])
            weights.append(model.part.get_weights()[0])
        same_numbers.assert_close(weights[1], weights[0])

    def test_a_model_without_a_call_whose_parts_are_not_built(self):
        model = build(lambda layers: Parts(layers[1:]), data=2)
        with self.assertRaisesRegex(ValueError, r"layers \['sequential"):
            model.fit(X, Y, verbose=0)


if __name__ == "__main__":
    absltest.main()
