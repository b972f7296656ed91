"""Optimizers of users' own, of which a trial tells what they do to shards."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import ops

import tfscale
from tests import same_numbers
from tests.tensor_parallel import optimizer_test
from tfscale.mesh.update import optimizer_trial
from tfscale.variables.sharding import Sharding

SGD = keras.optimizers.SGD
BOTH = [Sharding((8, 6), 4, 2, 2, 1, 0), Sharding((6,), 4, 2, 2, 0)]


class Plain(keras.optimizers.Optimizer):
    """A momentum by hand, with an argument that no config has."""

    def __init__(self, learning_rate, momentum=0.9, **kwargs):
        super().__init__(learning_rate, **kwargs)
        self.momentum = momentum

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.moments = self.add_optimizer_variables(variables, "moment")

    def update_step(self, gradient, variable, learning_rate):
        moment = self.moments[self._get_variable_index(variable)]
        self.assign(moment, moment * self.momentum + gradient)
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * moment)


class AssigningToSlots(Plain):
    def update_step(self, gradient, variable, learning_rate):
        moment = self.moments[self._get_variable_index(variable)]
        moment.assign(moment * self.momentum + gradient)
        variable.assign(variable - learning_rate * moment)


class ByNorm(keras.optimizers.Optimizer):
    def update_step(self, gradient, variable, learning_rate):
        norm = ops.sqrt(ops.sum(ops.square(gradient))) + 1e-6
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * gradient / norm)


class Clipping(SGD):
    def apply(self, grads, trainable_variables=None):
        grads, _ = tf.clip_by_global_norm(grads, 0.01)
        return super().apply(grads, trainable_variables)


class ClippingPairs(SGD):
    def apply_gradients(self, grads_and_vars):
        grads, variables = zip(*grads_and_vars)
        grads, _ = tf.clip_by_global_norm(grads, 0.01)
        return super().apply_gradients(zip(grads, variables))


class Centralizing(SGD):
    def apply(self, grads, trainable_variables=None):
        grads = [g - ops.mean(g, 0, keepdims=True) for g in grads]
        return super().apply(grads, trainable_variables)


class Noisy(SGD):
    def update_step(self, gradient, variable, learning_rate):
        noise = keras.random.normal(gradient.shape)
        super().update_step(gradient + noise, variable, learning_rate)


class WithoutConfig(Plain):
    def __init__(self, rate_of_learning, momentum):
        super().__init__(rate_of_learning, momentum)


class OptimizerTrialTest(parameterized.TestCase):
    @parameterized.parameters(
        lambda: Plain(0.1),
        lambda: SGD(1e-4, momentum=0.9, nesterov=True),
        lambda: SGD(0.1, clipnorm=0.1),
        lambda: keras.optimizers.Adam(0.1, amsgrad=True, use_ema=True),
        lambda: keras.optimizers.AdamW(
            keras.optimizers.schedules.CosineDecay(0.0, 9, warmup_target=1.0)
        ),
    )
    def test_passes_what_is_elementwise(self, make):
        self.assertTrue(optimizer_trial.is_elementwise(make(), BOTH))

    @parameterized.parameters(
        ByNorm,
        Clipping,
        ClippingPairs,
        Centralizing,
        Noisy,
        keras.optimizers.Lamb,
        keras.optimizers.Adafactor,
        keras.optimizers.Muon,
        tfscale.optimizers.LARS,
    )
    def test_finds_what_is_not(self, kind):
        self.assertFalse(optimizer_trial.is_elementwise(kind(0.1), BOTH))

    def test_what_looks_along_whole_dims_passes(self):
        columns = [Sharding((8, 6), 4, 1, 2, 1)]
        self.assertTrue(
            optimizer_trial.is_elementwise(Centralizing(0.1), columns)
        )


MESHES = {"model": dict(model=2), "zero": dict(data=2)}


def on(mesh, optimizer, build=optimizer_test.mlp):
    axes = MESHES[mesh]
    maps = optimizer_test.LAYOUTS if mesh == "model" else None
    strategy = tfscale.MeshStrategy(
        tfscale.device_mesh(**axes), maps, zero_stage=int(mesh == "zero")
    )
    with strategy.scope():
        model = build()
        model.compile(optimizer(), "mse")
    return model


class OwnOptimizerTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        mesh=list(MESHES), optimizer=(ByNorm, Clipping, Centralizing)
    )
    @pytest.mark.crossing(every=6)
    def test_is_refused_by_name_where_it_gets_shards(self, mesh, optimizer):
        model = on(mesh, lambda: optimizer(0.1))
        before = model.get_weights()
        name = optimizer.__name__
        with self.assertRaisesRegex(
            ValueError, f"elementwise. Received: {name}"
        ):
            model.fit(**optimizer_test.DATA, verbose=0)
        for value, found in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(found, value)

    @parameterized.parameters(*MESHES)
    @pytest.mark.crossing(every=2)
    def test_that_assigns_to_slots_is_told_how(self, mesh):
        # Keras only said that two shapes differ.
        model = on(mesh, lambda: AssigningToSlots(0.1))
        with self.assertRaisesRegex(ValueError, "Call `self.assign"):
            model.fit(**optimizer_test.DATA, verbose=0)

    @parameterized.parameters(*MESHES)
    @pytest.mark.crossing(every=2)
    def test_trains_as_on_one_device_if_it_is_elementwise(self, mesh):
        job = optimizer_test.job(lambda: Plain(0.05))
        if mesh == "model":
            found = same_numbers.on_ranks(job, 2, 1, optimizer_test.LAYOUTS)
        else:
            found = same_numbers.on_zero(job, 2)
        same_numbers.assert_same(self, same_numbers.on_one_device(job), found)

    def test_that_cannot_be_copied_is_warned_of(self):
        model = on("model", lambda: WithoutConfig(0.1, 0.9))
        with self.assertWarnsRegex(UserWarning, "WithoutConfig, which could"):
            model.train_on_batch(*(optimizer_test.DATA[k] for k in "xy"))

    @parameterized.parameters(Clipping, ClippingPairs)
    @pytest.mark.crossing(every=2)
    def test_clips_sums_on_replicas_without_shards(self, optimizer):
        # `apply_gradients` of one's own was given those of a replica.
        def build():
            model = optimizer_test.mlp()
            return OwnStep(model.inputs, model.outputs)

        job = optimizer_test.job(lambda: optimizer(0.05), build)
        found = same_numbers.on_ranks(job, 1, 2)
        expected = same_numbers.on_one_device(job)
        same_numbers.assert_same(self, expected, found)

    def test_clips_sums_of_microbatches(self):
        def trained(callbacks=()):
            keras.utils.set_random_seed(1)
            model = optimizer_test.mlp()
            model = OwnStep(model.inputs, model.outputs)
            model.compile(ClippingPairs(0.05), "mse")
            data = optimizer_test.DATA
            model.fit(**data, shuffle=False, verbose=0, callbacks=callbacks)
            return model.get_weights()

        expected = trained()
        found = trained([tfscale.callbacks.GradientAccumulation(4)])
        for value, weights in zip(expected, found, strict=True):
            np.testing.assert_allclose(weights, value, atol=1e-6)


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        pairs = zip(gradients, self.trainable_variables)
        self.optimizer.apply_gradients(pairs)
        return {"one": tf.ones(())}


if __name__ == "__main__":
    tf.test.main()
