"""A `compute_loss` of the user's own has the numbers of one device.

It was ignored: a model whose `compute_loss` was ten times Keras' own trained
with a loss of 3.04 in a pipeline and of 30.4 without one, and nobody was told.
"""

import warnings

import keras
import numpy as np
import pytest
from absl.testing import parameterized

import tfscale
from tests import same_numbers

RANDOM = np.random.RandomState(0)
# Two batches of 8 and one of 3, which three microbatches do not divide.
FEATURES = RANDOM.normal(size=(19, 4)).astype("float32")
VALUES = RANDOM.normal(size=(19, 3)).astype("float32")
WEIGHTS = RANDOM.uniform(size=19).astype("float32")
DATA = dict(x=FEATURES, y=VALUES, batch_size=8)


class Scaled(keras.Model):
    def compute_loss(
        self, x, y, y_pred, sample_weight=None, training=True, **kwargs
    ):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return 10.0 * loss


class WithMore(keras.Model):
    """Of a loss whose mean is not over rows, and another whose mean is."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return 0.1 * keras.ops.mean(y_pred**2) + loss


class WithInputs(keras.Model):
    """Knows no `training`, and wants no loss of `compile`."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        error = keras.ops.square(y - y_pred) * keras.ops.mean(x**2, 1)[:, None]
        return keras.ops.mean(error) + sum(self.losses)


class HandsOn(keras.Model):
    """Of a loss whose mean is not over rows."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return super().compute_loss(x, 2.0 * y, y_pred, sample_weight, training)


class Twice(keras.Model):
    """Of the same loss for two pairs of targets and predictions."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.5 * self._compile_loss(-y, y_pred, sample_weight)


class AddsScaled(keras.Model):
    """As in Keras' guide: what layers add, summed up at once."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = 3.0 * self._compile_loss(y, y_pred, sample_weight)
        return loss + keras.ops.sum(keras.ops.stack(self.losses))


class Adds(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(x**2))
        return x


class ReadsLayer(keras.Model):
    """Runs the model a second time."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return keras.ops.mean((self(x) - y) ** 2)


class LeavesOut(keras.Model):
    """Trains without the regularizers of its layers, in Keras too."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return keras.ops.mean((y_pred - y) ** 2)


def build(kind, regularizer="l2"):
    inputs = keras.Input((4,))
    x = keras.layers.Dense(5, "tanh", kernel_regularizer=regularizer, name="a")(
        inputs
    )
    x = keras.layers.Dense(5, "tanh", name="b")(x)
    return kind(inputs, keras.layers.Dense(3, name="c")(x))


def with_add_loss():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(5, "tanh", name="a")(inputs)
    x = Adds(name="adds")(x)
    return AddsScaled(inputs, keras.layers.Dense(3, name="c")(x))


def two_outputs():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(5, "tanh", name="a")(inputs)
    outputs = {
        name: keras.layers.Dense(3, name=name)(x) for name in ("one", "two")
    }
    return Scaled(inputs, outputs)


class OfSubclass(tfscale.PipelineModel):
    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return 10.0 * super().compute_loss(
            x, y, y_pred, sample_weight, training
        )


def mean_of_all(y, y_pred):
    return keras.ops.mean(keras.ops.square(y - y_pred))


def pipeline(model, kind=tfscale.PipelineModel, num_microbatches=2, loss="mse"):
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
    with strategy.scope():
        pipeline = kind(model(), num_microbatches, balance="params")
        pipeline.compile("sgd", loss)
    return pipeline


class OwnLossTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("scaled", lambda: build(Scaled, None), "mse", DATA),
        (
            "with_more",
            lambda: build(WithMore),
            lambda: keras.losses.MeanSquaredError("mean_with_sample_weight"),
            {**DATA, "sample_weight": WEIGHTS},
        ),
        (
            "scaled_by_weights",
            lambda: build(Scaled, None),
            lambda: keras.losses.MeanSquaredError("mean_with_sample_weight"),
            {**DATA, "sample_weight": WEIGHTS},
        ),
        (
            "twice",
            lambda: build(Twice),
            lambda: keras.losses.MeanSquaredError("mean_with_sample_weight"),
            {**DATA, "sample_weight": WEIGHTS},
        ),
        (
            "scaled_sum",
            lambda: build(Scaled, None),
            lambda: keras.losses.MeanSquaredError("sum"),
            DATA,
        ),
        ("with_add_loss", with_add_loss, "mse", DATA),
        ("of_inputs", lambda: build(WithInputs), "mse", DATA),
        ("of_two_outputs", two_outputs, {"one": "mse", "two": "mae"}, DATA),
        (
            "handed_on",
            lambda: build(HandsOn),
            lambda: keras.losses.MeanSquaredError("mean_with_sample_weight"),
            {**DATA, "sample_weight": WEIGHTS},
        ),
    )
    @pytest.mark.crossing(every=9)
    def test_same_numbers(self, model, loss, data):
        if isinstance(loss, dict):
            data = {**data, "y": {name: VALUES for name in loss}}
        job = same_numbers.Job(
            model,
            data,
            loss=loss if callable(loss) else lambda: loss,
            fit=dict(validation_data=(FEATURES[:5], VALUES[:5]))
            if not isinstance(loss, dict)
            else {},
        )
        one = same_numbers.on_one_device(job)
        many = same_numbers.on_mesh(job, 2, 3, 2)
        same_numbers.assert_same(self, one, many)

    def test_that_of_a_subclass_of_the_pipeline_is_called(self):
        data = FEATURES[:6], VALUES[:6]
        plain = pipeline(lambda: build(keras.Model, None))
        own = pipeline(lambda: build(keras.Model, None), OfSubclass)
        own.set_weights(plain.get_weights())
        loss = own.train_on_batch(*data)
        same_numbers.assert_close(loss, 10.0 * plain.train_on_batch(*data))

    def test_a_scalar_loss_is_named_where_a_batch_has_parts(self):
        data = FEATURES[:6], VALUES[:6]
        for count in (1, 2):
            model = pipeline(
                lambda: build(keras.Model, None), OfSubclass, count, mean_of_all
            )
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                model.train_on_batch(*data)
            found = [str(x.message) for x in found]
            named = ["'mean_of_all', which returns" in text for text in found]
            self.assertEqual(sum(named), count - 1, found)

    @parameterized.named_parameters(
        ("reads_layer", ReadsLayer, r"a/kernel' of another stage.*return what"),
        ("leaves_out", LeavesOut, "leaves out.*regularizer of 'a/kernel'"),
        ("scales", Scaled, "scales.*regularizer of 'a/kernel'"),
    )
    def test_what_a_pipeline_cannot_do_is_refused(self, kind, message):
        model = pipeline(lambda: build(kind))
        with (
            warnings.catch_warnings(action="ignore"),
            self.assertRaisesRegex(ValueError, message),
        ):
            model.fit(**DATA, verbose=0)
