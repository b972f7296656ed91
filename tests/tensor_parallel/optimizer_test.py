"""What an optimizer does to shards is what it does to whole variables."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tfscale.collectives import rank_collectives

RANDOM = np.random.RandomState(0)
DATA = dict(
    x=RANDOM.randn(48, 12).astype("float32"),
    y=RANDOM.randn(48, 12).astype("float32"),
    batch_size=16,
)
LAYOUTS = {
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
}
OPTIMIZERS = keras.optimizers


def mlp(**kwargs):
    x = inputs = keras.Input((12,))
    x = keras.layers.Dense(24, activation="relu", name="up", **kwargs)(x)
    x = keras.layers.Dense(12, name="down", **kwargs)(x)
    return keras.Model(inputs, x, name="mlp")


def job(make_optimizer=lambda: OPTIMIZERS.SGD(0.05), build=mlp):
    return same_numbers.Job(build, DATA, optimizer=make_optimizer)


def scaled(inner):
    return OPTIMIZERS.LossScaleOptimizer(
        inner, initial_scale=1024.0, dynamic_growth_steps=2
    )


# Limits so small that they clip every gradient.
MAKE = {
    "momentum": lambda: OPTIMIZERS.SGD(0.05, momentum=0.9, nesterov=True),
    "weight_decay": lambda: OPTIMIZERS.AdamW(0.01, weight_decay=0.1),
    "clipnorm": lambda: OPTIMIZERS.SGD(0.05, clipnorm=0.01),
    "global_clipnorm": lambda: OPTIMIZERS.Adam(0.01, global_clipnorm=0.01),
    "loss_scale_factor": lambda: OPTIMIZERS.SGD(
        0.05, global_clipnorm=0.01, loss_scale_factor=256.0
    ),
    "clipvalue": lambda: OPTIMIZERS.SGD(0.05, clipvalue=0.001),
    "ema": lambda: OPTIMIZERS.SGD(
        0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2
    ),
    "loss_scale": lambda: scaled(OPTIMIZERS.Adam(0.01, global_clipnorm=0.1)),
}
BUILDS = {
    "constraint": functools.partial(
        mlp, kernel_constraint=keras.constraints.MaxNorm(0.5)
    ),
    "regularizer": functools.partial(
        mlp, kernel_regularizer="l2", bias_regularizer="l1"
    ),
    "activity": functools.partial(
        mlp, activity_regularizer=keras.regularizers.L2(0.1)
    ),
}
JOBS = {
    **{name: job(make) for name, make in MAKE.items()},
    **{name: job(build=build) for name, build in BUILDS.items()},
}


@functools.cache
def one_device(name):
    return same_numbers.on_one_device(JOBS[name])


def on_two_ranks(build, optimizer):
    mesh = tfscale.device_mesh(model=2)
    with tfscale.MeshStrategy(mesh, LAYOUTS).scope():
        model = build()
        model.compile(optimizer(), "mse")
    return model


class OptimizerTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        *((name, (2, 2)) for name in JOBS),
        # Of norms, and what layers add, replicas have a share too.
        ("clipnorm", (1, 2)),
        ("loss_scale", (1, 2)),
        ("activity", (1, 2)),
    )
    @pytest.mark.crossing(every=14)
    def test_has_the_numbers_of_one_device(self, name, size):
        outcome = same_numbers.on_ranks(JOBS[name], size[1], size[0], LAYOUTS)
        same_numbers.assert_same(self, one_device(name), outcome)

    def test_infinity_in_one_shard_skips_the_step_on_all(self):
        model = on_two_ranks(
            mlp, lambda: scaled(OPTIMIZERS.SGD(0.1, momentum=0.9))
        )
        strategy = model.distribute_strategy
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        kernel = model.get_layer("up").kernel

        def step(bad):
            gradients = [tf.ones(v.shape) for v in model.trainable_variables]
            # Column 3 is the first rank's.
            entry = tf.tensor_scatter_nd_update(
                gradients[0], [[0, 3]], [np.inf if bad else 1.0]
            )

            @tf.function(autograph=False)
            def apply():
                parts = [
                    rank_collectives.local_shard(g, v.value.sharding.model_dim)
                    if v.value.sharding.is_sharded
                    else g
                    for g, v in zip(
                        [entry, *gradients[1:]], model.trainable_variables
                    )
                ]
                model.optimizer.apply(parts)

            strategy.run(apply)

        before = model.get_weights()
        step(bad=True)
        for value, found in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(found, value)
        self.assertEqual(np.array(model.optimizer.dynamic_scale), 512.0)
        step(bad=False)
        self.assertGreater(np.abs(kernel.numpy() - before[0]).min(), 0)

    @parameterized.named_parameters(
        ("adafactor", mlp, OPTIMIZERS.Adafactor, "Adafactor, which needs"),
        ("lamb", mlp, OPTIMIZERS.Lamb, "Lamb, which needs whole"),
        ("muon", mlp, OPTIMIZERS.Muon, "Muon, which needs whole"),
        (
            "accumulation",
            mlp,
            lambda: OPTIMIZERS.SGD(gradient_accumulation_steps=2),
            "gradient_accumulation_steps.*GradientAccumulation",
        ),
        (
            "constraint_and_loss_scale",
            BUILDS["constraint"],
            lambda: scaled(OPTIMIZERS.SGD()),
            "constraint whose slots are sharded.*loss scaling.*up/kernel",
        ),
    )
    def test_refuses(self, build, optimizer, message):
        model = on_two_ranks(build, optimizer)
        with self.assertRaisesRegex(ValueError, f"(?s){message}"):
            model.fit(**DATA, verbose=0)


if __name__ == "__main__":
    tf.test.main()
