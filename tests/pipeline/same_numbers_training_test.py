"""A pipeline has the numbers of one device: everything about training."""

import dataclasses
import functools
import inspect

import keras
import numpy as np
import pytest
from absl.testing import parameterized

from tests import same_numbers

RANDOM = np.random.RandomState(0)
ROWS = 34
TOKENS = RANDOM.randint(0, 9, (ROWS, 4))
LABELS = RANDOM.randint(0, 3, ROWS)
WEIGHTS = RANDOM.uniform(0.0, 2.0, ROWS).astype("float32")


def build():
    """Two stages; rows of the lookup occur often."""
    tokens = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(9, 6)(tokens)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(8, "tanh", name="a")(x)
    return keras.Model(tokens, keras.layers.Dense(3, name="b")(x))


def two_outputs():
    tokens = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(9, 6)(tokens)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(8, "tanh", name="a")(x)
    y = keras.layers.Dense(3, name="one")(x)
    return keras.Model(tokens, [y, keras.layers.Dense(2, name="two")(x)])


def crossentropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, **options
    )


def job(optimizer=None, loss=crossentropy, data=None, fit=None, **compile):
    return same_numbers.Job(
        build,
        {"x": TOKENS, "y": LABELS, "batch_size": 16} | (data or {}),
        optimizer or (lambda: keras.optimizers.SGD(0.05, momentum=0.9)),
        loss,
        lambda: compile,
        fit or {},
    )


def every_optimizer():
    """All of Keras but the two that wrap others."""
    for name, kind in inspect.getmembers(keras.optimizers, inspect.isclass):
        if (
            issubclass(kind, keras.optimizers.Optimizer)
            and kind is not keras.optimizers.Optimizer
            and kind is not keras.optimizers.LossScaleOptimizer
            and kind is not keras.optimizers.MultiOptimizer
        ):
            yield name, kind


def schedule():
    return keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.05, 0.005])


def excluded(pattern):
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=1.0)
    optimizer.exclude_from_weight_decay(var_names=[pattern])
    return optimizer


OPTIMIZERS = dict(
    clipnorm=functools.partial(keras.optimizers.Adam, 0.01, clipnorm=0.1),
    global_clipnorm=functools.partial(
        keras.optimizers.SGD, 0.5, momentum=0.9, global_clipnorm=0.1
    ),
    clipvalue=functools.partial(keras.optimizers.SGD, 0.5, clipvalue=0.01),
    weight_decay=functools.partial(
        keras.optimizers.Adam, 0.01, weight_decay=0.1
    ),
    ema=functools.partial(
        keras.optimizers.SGD,
        0.05,
        use_ema=True,
        ema_momentum=0.7,
        ema_overwrite_frequency=2,
    ),
    learning_rate_schedule=lambda: keras.optimizers.SGD(schedule()),
    loss_scale_factor=functools.partial(
        keras.optimizers.SGD, 0.05, loss_scale_factor=128.0
    ),
    loss_scale_optimizer=lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9),
        initial_scale=2.0,
        dynamic_growth_steps=2,
    ),
    multi_optimizer=lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.05, momentum=0.9),
            {"a/.*": keras.optimizers.Adam(0.01)},
        )
    ),
    gradient_accumulation=functools.partial(
        keras.optimizers.SGD, 0.05, 0.9, gradient_accumulation_steps=2
    ),
    accumulation_clipped=functools.partial(
        keras.optimizers.Adam,
        0.01,
        gradient_accumulation_steps=2,
        global_clipnorm=0.1,
        use_ema=True,
    ),
    excluded_from_decay=lambda: excluded("a/"),
)


class OptimizersTest(parameterized.TestCase):
    @parameterized.named_parameters(every_optimizer())
    @pytest.mark.crossing(every=24)
    def test_every_optimizer(self, kind):
        # Larger than the gradients' rounding errors, where one divides.
        options = {"learning_rate": 0.01}
        if "epsilon" in inspect.signature(kind).parameters:
            options["epsilon"] = 1e-4
        if kind is keras.optimizers.Ftrl:
            # It subtracts roots of sums of squared gradients, of which the
            # default, 0.1, would leave no digits.
            options["initial_accumulator_value"] = 1e-5
        self.check(job(functools.partial(kind, **options)))

    @parameterized.named_parameters(OPTIMIZERS.items())
    @pytest.mark.crossing(every=12)
    def test_options(self, optimizer):
        self.check(job(optimizer))

    def check(self, job):
        # No batch is smaller than the others: half the traces.
        whole = {"x": TOKENS[:32], "y": LABELS[:32], "batch_size": 16}
        job = dataclasses.replace(job, data=whole)
        one = same_numbers.on_one_device(job)
        many = same_numbers.on_mesh(job, 2, 3, 2, balance=["b"])
        same_numbers.assert_same(self, one, many)


def mean_with_sample_weight():
    return crossentropy(reduction="mean_with_sample_weight")


def metrics():
    return dict(
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)],
        weighted_metrics=["accuracy"],
    )


class LossesTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("sum", lambda: crossentropy(reduction="sum"), {}),
        ("mean", lambda: crossentropy(reduction="mean"), {}),
        ("function", lambda: keras.losses.sparse_categorical_crossentropy, {}),
        ("sample_weight", crossentropy, dict(sample_weight=WEIGHTS)),
        (
            "mean_with_sample_weight",
            mean_with_sample_weight,
            dict(sample_weight=WEIGHTS),
        ),
        (
            "class_weight",
            crossentropy,
            dict(class_weight={0: 0.5, 1: 2.0, 2: 1.0}),
        ),
        ("ignored_class", lambda: crossentropy(ignore_class=1), {}),
    )
    @pytest.mark.crossing(every=8)
    def test_losses_and_weights(self, loss, data):
        one = job(loss=loss, data=data)
        one = dataclasses.replace(one, compile=metrics)
        self.check(one, "b")

    def test_several_losses_with_weights_of_each(self):
        self.check(
            same_numbers.Job(
                two_outputs,
                dict(
                    x=TOKENS,
                    y=[LABELS, RANDOM.normal(size=(ROWS, 2))],
                    sample_weight=[WEIGHTS, WEIGHTS[::-1]],
                    batch_size=16,
                ),
                loss=lambda: [crossentropy(), "mae"],
                compile=lambda: dict(
                    loss_weights=[0.3, 2.0],
                    metrics=[["accuracy"], ["mse"]],
                    weighted_metrics=[[], ["mse"]],
                ),
            ),
            "one",
        )

    def check(self, job, cut):
        one = same_numbers.on_one_device(job)
        many = same_numbers.on_mesh(job, 2, 3, 2, balance=[cut])
        same_numbers.assert_same(self, one, many)
