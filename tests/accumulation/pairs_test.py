"""Every two features together, in microbatches and in the whole batch.

All combinations of the features would take days; of every two values of
different features there is a row that has both. Faults of three at once are
left to whoever finds one.
"""

import collections
import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tfscale
from tests import crossings
from tests import same_numbers

FEATURES = {
    "microbatches": (1, 2, 3, 4, 8),
    "clipping": (None, "clipnorm", "clipvalue", "global_clipnorm"),
    "kind": ("functional", "call", "train_step", "compute_loss"),
    "reduction": ("sum_over_batch_size", "sum", "mean_with_sample_weight"),
    "precision": ("float32", "mixed_float16", "mixed_bfloat16"),
    "average": (False, True),
    "schedule": (False, True),
    "mask": (False, True),
    "weights": (False, True),
    "regularizers": (False, True),
    "outputs": (1, 2),
    "ragged": (False, True),
    "replicas": (1, 2),
    "statistics": (False, True),
    "eagerly": (False, True),
}
RTOL = 1e-6
# In half precision both sides are sums of rounded numbers, and which of them is
# nearer to what is due is chance. What comes out of a layer is the same in any
# batch, bit by bit; gradients of kernels are rounded once for each part; those
# of biases at each term, so in parts they are better. Over all tensors parts
# were 0.43 to 1.09 times as far from it as the whole batch, 0.81 on average.
CHANCE = 1.25

Row = collections.namedtuple("Row", FEATURES)


def can_be(row):
    """Threads of replicas do not run operation by operation."""
    return not (row.get("eagerly") and row.get("replicas") == 2)


ROWS = [Row(**row) for row in crossings.pairs(can_be, **FEATURES)]

# The first rows of a batch have no weight, or nothing but padding; others are
# short, and the last ones long. 35 rows leave three for the last step: fewer
# than there are microbatches.
RANDOM = np.random.RandomState(0)
PLACES = np.arange(35) % 16
LENGTHS = np.select([PLACES < 2, PLACES < 8], [0, 1], 4)
TOKENS = np.where(
    np.arange(4) < LENGTHS[:, None], RANDOM.randint(1, 7, (35, 4)), 0
)
TARGETS = RANDOM.normal(loc=1.0, size=(35, 4, 3)).astype("float32")
WEIGHTS = RANDOM.uniform(0.1, 2.0, (35, 4)).astype("float32")
WEIGHTS[PLACES < 2] = 0.0


class Nothing(keras.layers.Layer):
    """Zeros, so that what comes in is looked at and makes no difference."""

    def __init__(self, **options):
        super().__init__(**options)
        self.supports_masking = True

    def call(self, inputs):
        return 0.0 * inputs


class Activity(keras.regularizers.L2):
    """In float32: Keras cannot add up losses of two dtypes."""

    def __call__(self, x):
        return super().__call__(tf.cast(x, tf.float32))


class OwnCall(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x, training=False):
        return self.inner(x, training=training)


class OwnStep(keras.Model):
    """Part of its loss may be made without `compute_loss`."""

    adds = False

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
            if self.adds:
                for each in keras.tree.flatten(y_pred):
                    square = tf.square(tf.cast(each, tf.float32))
                    loss += tf.reduce_mean(square)
            loss = self.optimizer.scale_loss(loss)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.compute_metrics(x, y, y_pred, sample_weight)


class OwnLoss(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        for each in keras.tree.flatten(y_pred):
            loss += tf.reduce_mean(tf.abs(tf.cast(each, tf.float32)))
        return loss


def build(row):
    keras.config.set_dtype_policy(row.precision)
    try:
        return _build(row)
    finally:
        keras.config.set_dtype_policy("float32")


def _build(row):
    x = keras.Input((4,), dtype="int32")
    h = keras.layers.Embedding(7, 5, mask_zero=row.mask, name="a")(x)
    if row.statistics:
        normalize = keras.layers.BatchNormalization(momentum=0.6, name="n")
        h = keras.layers.Add(name="s")([h, Nothing(name="z")(normalize(h))])
    regularizers = {}
    if row.regularizers:
        regularizers = dict(
            kernel_regularizer="l2",
            activity_regularizer=Activity(0.1),
        )
    dense = keras.layers.Dense(4, "tanh", name="b", **regularizers)
    h = dense(h)
    outputs = [
        keras.layers.Dense(3, name=f"out{i}")(h) for i in range(row.outputs)
    ]
    outputs = outputs if row.outputs > 1 else outputs[0]
    kinds = {"train_step": OwnStep, "compute_loss": OwnLoss}
    model = kinds.get(row.kind, keras.Model)(x, outputs)
    # Of replicas it would have to be what they add up to.
    model.adds = row.replicas == 1
    if row.kind == "call":
        model = OwnCall(model)
        model(TOKENS[:1])
    return model


def optimizer(row):
    rate = 0.05
    if row.schedule:
        rate = keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.5)
    options = {}
    if row.clipping:
        # About a quarter of the largest gradients, whose digits are compared.
        options[row.clipping] = 8.0 if row.reduction == "sum" else 0.2
    if row.average:
        options |= dict(
            use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2
        )
    found = keras.optimizers.Adam(rate, epsilon=1e-2, **options)
    if row.precision == "mixed_float16":
        return keras.optimizers.LossScaleOptimizer(found, initial_scale=8.0)
    return found


def job(row):
    rows = 35 if row.ragged else 32
    data = dict(x=TOKENS[:rows], y=TARGETS[:rows], batch_size=16)
    if row.weights:
        data["sample_weight"] = WEIGHTS[:rows]
    if row.outputs > 1:
        for name in ("y", "sample_weight"):
            if name in data:
                data[name] = [data[name], data[name][::-1].copy()]

    def loss():
        first = keras.losses.MeanSquaredError(row.reduction)
        return first if row.outputs == 1 else [first, "mae"]

    options = {} if row.outputs == 1 else dict(loss_weights=[0.3, 2.0])
    return same_numbers.Job(
        lambda: build(row),
        data,
        lambda: optimizer(row),
        loss,
        compile=lambda: dict(run_eagerly=row.eagerly, **options),
    )


def only_the_loss(outcome):
    """Of several losses in a graph Keras weighs the last batch otherwise."""
    return dataclasses.replace(outcome, logs={"loss": outcome.logs["loss"]})


def one_by_one(made):
    """Operation by operation: to trace takes longer than to train."""
    compile_ = made.compile
    return dataclasses.replace(
        made, compile=lambda: dict(compile_(), run_eagerly=True)
    )


def distance(outcome, truth):
    """Over all tensors, the root mean square of their largest errors."""
    errors = []

    def add(found, value, initial=0.0):
        if not np.issubdtype(value.dtype, np.inexact):
            np.testing.assert_array_equal(found, value)
            return
        largest = np.max(np.abs(value), initial=np.max(np.abs(initial)))
        if largest:
            errors.append(np.max(np.abs(found - value)) / largest)

    for path, value in truth.variables.items():
        add(outcome.variables[path], value, truth.initial[path])
    for (_, found), (_, value) in zip(outcome.slots, truth.slots, strict=True):
        add(found, value)
    add(outcome.logs["loss"], np.asarray(truth.logs["loss"]))
    return np.sqrt(np.mean(np.square(errors)))


class PairsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (f"{i}_{row.kind}_{row.microbatches}_on_{row.replicas}", row)
        for i, row in enumerate(ROWS)
    )
    @pytest.mark.crossing(every=25)
    def test_whole_batch(self, row):
        made = job(row)
        # One microbatch on one device is plain Keras, of which lookups are
        # another matter.
        is_plain = row.microbatches == row.replicas == 1
        train = same_numbers.plain if is_plain else same_numbers.on_one_device
        expected = train(one_by_one(made))
        callback = tfscale.callbacks.GradientAccumulation(row.microbatches)
        cut = dataclasses.replace(made, fit=dict(callbacks=[callback]))
        if row.replicas > 1:
            actual = same_numbers.on_zero(cut, row.replicas, zero_stage=0)
        else:
            actual = same_numbers.plain(cut)
        # A step of three rows, and one of 16.
        iterations = int(actual.model.optimizer.iterations.numpy())
        self.assertEqual(iterations, 3 if row.ragged else 2)
        if row.precision == "float32":
            same_numbers.assert_same(
                self, only_the_loss(expected), only_the_loss(actual), RTOL
            )
            return
        exact = row._replace(precision="float32")
        made = dataclasses.replace(made, build=lambda: build(exact))
        truth = train(one_by_one(made))
        self.assertLess(
            distance(actual, truth), CHANCE * distance(expected, truth)
        )


if __name__ == "__main__":
    absltest.main()
