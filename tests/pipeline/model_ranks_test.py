"""Stages whose layers are split: data x pipeline x model, as on one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.tensor_parallel import same_numbers_test as jobs
from tests.variables import zero_test

LAYERS = keras.layers


def channels():
    """Convolutions with statistics per channel, regularized, with dropout 0."""
    x = inputs = keras.Input((6, 6, 4))
    for index in range(2):
        x = LAYERS.Conv2D(
            8, 3, padding="same", kernel_regularizer="l2", name=f"wide_{index}"
        )(x)
        x = LAYERS.BatchNormalization(name=f"norm_{index}")(x)
        x = LAYERS.ReLU(name=f"relu_{index}")(x)
        x = LAYERS.Conv2D(4, 1, use_bias=False, name=f"narrow_{index}")(x)
    x = LAYERS.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, LAYERS.Dense(3, name="out")(x), name="channels")


LAYOUTS = {
    ".*wide_./kernel": (None, None, None, "model"),
    ".*wide_./bias": ("model",),
    ".*norm_./.*": ("model",),
    ".*narrow_./kernel": (None, None, "model", None),
}


JOBS = {name: zero_test.JOBS[name] for name in ("block_whole", "block_adam")}
JOBS["gpt_adam"] = jobs.JOBS["gpt_adam"]


@functools.cache
def one_device(job):
    return same_numbers.on_one_device(JOBS[job])


@functools.cache
def gpt_over_three_axes(job):
    return same_numbers.on_mesh(JOBS[job], 2, 2, 2, num_ranks=2)


class SameNumbersTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("mlp_sgd", 1, 1, 2, {}),
        ("mlp_sgd", 2, 2, 2, {"recompute": True, "schedule": "gpipe"}),
        ("mlp_adam", 1, 2, 4, {}),
    )
    @pytest.mark.crossing
    def test_of_one_device(self, job, replicas, stages, ranks, options):
        outcome = same_numbers.on_mesh(
            jobs.JOBS[job], stages, 4, replicas, num_ranks=ranks, **options
        )
        same_numbers.assert_same(self, jobs.one_device(job), outcome)

    @parameterized.parameters(*JOBS)
    @pytest.mark.crossing(every=3)
    def test_a_gpt_over_all_three_axes(self, job):
        same_numbers.assert_same(
            self, one_device(job), gpt_over_three_axes(job)
        )

    @pytest.mark.crossing
    def test_of_a_pipeline_without_ranks(self):
        # BatchNormalization sees microbatches: so does the other side.
        random = np.random.RandomState(0)
        job = same_numbers.Job(
            channels,
            dict(
                x=random.randn(32, 6, 6, 4).astype("float32"),
                y=random.randn(32, 3).astype("float32"),
                batch_size=16,
            ),
        )
        same_numbers.assert_same(
            self,
            same_numbers.on_mesh(job, 2, 4),
            same_numbers.on_mesh(job, 2, 4, num_ranks=2, layouts=LAYOUTS),
            unmoved=("wide_0_bias", "wide_1_bias"),
        )

    @pytest.mark.crossing
    def test_convolutions_with_a_bias_in_bfloat16(self):
        # Grappler fused them into an operation that a graph refuses.
        keras.config.set_dtype_policy("mixed_bfloat16")
        random = np.random.RandomState(0)
        x = random.randn(8, 6, 6, 4).astype("float32")
        y = random.randn(8, 3).astype("float32")

        def trained(model, **options):
            model.compile("sgd", "mse", **options)
            (loss,) = model.fit(x, y, verbose=0).history["loss"]
            return loss, model.predict(x, verbose=0)

        def build():
            keras.utils.set_random_seed(0)
            inputs = keras.Input((6, 6, 4))
            wide = LAYERS.Conv2D(8, 3, activation="relu", name="wide_0")
            x = LAYERS.Conv2D(4, 1, name="narrow_0")(wide(inputs))
            x = LAYERS.GlobalAveragePooling2D()(x)
            return keras.Model(inputs, LAYERS.Dense(3)(x))

        mesh = tfscale.device_mesh(pipeline=2, model=2)
        layout_map = keras.distribution.LayoutMap(mesh)
        layout_map[".*wide_0/kernel"] = (None, None, None, "model")
        layout_map[".*wide_0/bias"] = ("model",)
        layout_map[".*narrow_0/kernel"] = (None, None, "model", None)
        with tfscale.MeshStrategy(mesh, layout_map).scope():
            model = tfscale.PipelineModel(build(), num_microbatches=2)
            loss, predictions = trained(model)
        loss_of_one, predictions_of_one = trained(build(), run_eagerly=True)
        self.assertAllClose(loss, loss_of_one, rtol=1e-2)
        self.assertAllClose(predictions, predictions_of_one, atol=2e-2)


class PlacementTest(tf.test.TestCase):
    def test_every_shard_is_on_its_stage_and_rank(self):
        model = gpt_over_three_axes("block_whole").model
        plan, grid = model.plan, model.distribute_strategy.device_grid
        sharded = 0
        for variable, home in zip(plan.variables, plan.homes):
            parts = variable.value.values
            stage = plan.schedule.stage_devices[home]
            self.assertEqual(
                [part.device for part in parts],
                [device for replica in grid for device in replica[stage]],
            )
            split = variable.value.sharding.model_dim
            sharded += split is not None
            whole = list(variable.shape)
            if split is not None:
                whole[split] //= 2
            for part in parts:
                self.assertEqual(part.shape, whole, variable.path)
        self.assertEqual(sharded, 10)

    @pytest.mark.crossing
    def test_predictions_and_evaluation_are_those_of_one_device(self):
        data = jobs.JOBS["block_adam"].data
        x, y = data["x"], data["y"]
        plain = one_device("block_adam").model
        model = gpt_over_three_axes("block_adam").model
        # Of the last 7 rows replica 0 has a batch as large as those before,
        # and so met nobody when replica 1 asked for a program of 3 rows.
        same_numbers.assert_close(
            model.predict(x[:15], batch_size=8, verbose=0),
            plain.predict(x[:15], batch_size=8, verbose=0),
        )
        same_numbers.assert_close(
            model.evaluate(x, y, batch_size=14, verbose=0),
            plain.evaluate(x, y, batch_size=14, verbose=0),
        )


class FailureTest(tf.test.TestCase):
    @pytest.mark.crossing
    def test_a_layer_that_fails_is_named(self):
        class Refuses(LAYERS.Layer):
            def call(self, x):
                with tf.control_dependencies(
                    [tf.debugging.assert_less(x[0, 0], 1e3)]
                ):
                    return tf.identity(x)

        mesh = tfscale.device_mesh(pipeline=2, model=2)
        layout_map = keras.distribution.LayoutMap(mesh)
        layout_map[".*up/kernel"] = (None, "model")
        layout_map[".*down/kernel"] = ("model", None)
        with tfscale.MeshStrategy(mesh, layout_map).scope():
            model = keras.Sequential(
                [
                    keras.Input((4,)),
                    LAYERS.Dense(8, name="up"),
                    LAYERS.Dense(4, name="down"),
                    Refuses(name="refuses"),
                    LAYERS.Dense(4, name="last"),
                ]
            )
            model = tfscale.PipelineModel(model, 2, balance=["refuses"])
            model.compile("sgd", "mse")
        x = np.ones((4, 4), "float32")
        model.fit(x, x, verbose=0)
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, "'refuses'.*stage 1"
        ):
            model.fit(x * 1e6, x, verbose=0)
        model.fit(x, x, verbose=0)


if __name__ == "__main__":
    tf.test.main()
