"""A `train_step` that changes gradients by hand has those of one device."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.tensor_parallel import optimizer_test
from tests.tensor_parallel.optimizer_test import DATA
from tests.tensor_parallel.optimizer_test import LAYOUTS


class Stepping(keras.Model):
    """Applies `change(model, gradients, x, y)`."""

    change = None
    sums = True

    def gradients_of(self, x, y):
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, variables)
        if self.sums:
            gradients = tfscale.sum_gradients(gradients, variables)
        return gradients

    def train_step(self, data):
        gradients = self.change(self.gradients_of(*data), *data)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"one": tf.ones(())}


def clipped(model, gradients, x, y):
    return tf.clip_by_global_norm(gradients, 0.01)[0]


def decayed(model, gradients, x, y):
    return [g + 0.1 * v for g, v in zip(gradients, model.trainable_variables)]


def centralized(model, gradients, x, y):
    return [g - tf.reduce_mean(g, -1, keepdims=True) for g in gradients]


def sharpness_aware(model, gradients, x, y):
    """The gradients at the worst point nearby (Foret et al., 2021)."""
    norm = tf.linalg.global_norm(gradients)
    moves = [0.05 * g / norm for g in gradients]
    for variable, move in zip(model.trainable_variables, moves):
        variable.assign_add(move)
    model.sums = not model.sums  # the second ones are left to `apply`
    gradients = model.gradients_of(x, y)
    model.sums = not model.sums
    for variable, move in zip(model.trainable_variables, moves):
        variable.assign_sub(move)
    return gradients


def partly(model, gradients, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) ** 2)
    more = tape.gradient(loss, model.trainable_variables)
    return [g + m for g, m in zip(gradients, more)]


def model_of(change, sums=True, base=Stepping):
    kind = type("Model", (base,), {"change": change, "sums": sums})
    inner = optimizer_test.mlp()
    return kind(inner.inputs, inner.outputs, name="mlp")


def job(change, optimizer=None):
    build = functools.partial(model_of, change)
    found = optimizer_test.job(build=build)
    return found if optimizer is None else _with(found, optimizer)


def _with(found, optimizer):
    return dataclasses.replace(found, optimizer=optimizer)


@functools.cache
def one_device(change, optimizer=None):
    return same_numbers.on_one_device(job(change, optimizer))


CHANGES = (clipped, decayed, centralized, sharpness_aware)
ADAM = optimizer_test.MAKE["global_clipnorm"]
SCALED = optimizer_test.MAKE["loss_scale"]


class SumGradientsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        *((change, 2, 2) for change in CHANGES),
        (clipped, 2, 1),
        (sharpness_aware, 2, 1),
        (decayed, 1, 2),
    )
    @pytest.mark.crossing(every=8)
    def test_has_the_numbers_of_one_device(self, change, data, model):
        found = same_numbers.on_ranks(job(change), model, data, LAYOUTS)
        same_numbers.assert_same(self, one_device(change), found)

    @parameterized.parameters((clipped, 1), (sharpness_aware, 1), (decayed, 2))
    @pytest.mark.crossing(every=3)
    def test_has_them_where_replicas_divide_slots(self, change, model):
        job_ = job(change, ADAM)
        found = same_numbers.on_zero(job_, 2, model=model, layouts=LAYOUTS)
        same_numbers.assert_same(self, one_device(change, ADAM), found)

    @pytest.mark.crossing
    def test_has_them_with_loss_scaling(self):
        job_ = job(decayed, SCALED)
        found = same_numbers.on_zero(job_, 2, model=2, layouts=LAYOUTS)
        same_numbers.assert_same(self, one_device(decayed, SCALED), found)

    def test_gradients_of_lookups(self):
        def build():
            tokens = keras.Input((3,), dtype="int32")
            x = keras.layers.Embedding(8, 4, name="table")(tokens)
            x = keras.layers.Dense(2, name="down")(x)
            kind = type("Model", (Stepping,), {"change": clipped})
            return kind(tokens, x, name="tokens")

        x = np.random.RandomState(0).randint(0, 8, (16, 3))
        y = np.random.RandomState(1).normal(size=(16, 3, 2))
        job_ = same_numbers.Job(build, dict(x=x, y=y, batch_size=8))
        found = same_numbers.on_ranks(
            job_, 2, 2, {"table/embeddings": ("model", None)}
        )
        expected = same_numbers.on_one_device(job_)
        same_numbers.assert_same(self, expected, found)

    @pytest.mark.crossing
    def test_a_second_sum_changes_nothing(self):
        def again(model, gradients, x, y):
            variables = model.trainable_variables
            gradients = tfscale.sum_gradients(gradients, variables)
            return clipped(model, gradients, x, y)

        found = same_numbers.on_ranks(job(again), 2, 2, LAYOUTS)
        same_numbers.assert_same(self, one_device(clipped), found)

    def test_sums_and_others_are_added(self):
        found = same_numbers.on_zero(job(partly), 2, zero_stage=0)
        same_numbers.assert_same(self, one_device(partly), found)

    def test_in_a_loop_by_hand_replicas_run_the_step_of_a_model(self):
        def train(data):
            same_numbers.reset()
            strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=data))
            with strategy.scope():
                model = model_of(clipped)
                model.compile("sgd", "mse")
            batches = tf.data.Dataset.from_tensors((DATA["x"], DATA["y"]))
            batches = strategy.experimental_distribute_dataset(
                batches.unbatch().batch(8)
            )
            step = tf.function(lambda b: strategy.run(model.train_step, (b,)))
            for batch in batches:
                step(batch)
            return model.get_weights()

        self.assertAllClose(train(2), train(1), rtol=1e-5, atol=1e-6)

    def test_is_refused_in_a_function_that_is_no_step_of_a_model(self):
        # What an optimizer sums once more would be too large, silently.
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=2))
        with strategy.scope():
            model = optimizer_test.mlp()

        def step():
            variables = model.trainable_variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(DATA["x"]) ** 2)
            tfscale.sum_gradients(tape.gradient(loss, variables), variables)

        with self.assertRaisesRegex(
            ValueError, "strategy.run.model.train_step"
        ):
            strategy.run(step)

    def test_is_refused_in_microbatches(self):
        model = model_of(clipped)
        model.compile("sgd", "mse")
        callback = tfscale.callbacks.GradientAccumulation(4)
        with self.assertRaisesRegex(ValueError, "in a microbatch.*clipnorm"):
            model.fit(**DATA, callbacks=[callback], verbose=0)

    @pytest.mark.crossing
    def test_has_them_eagerly(self):
        eager = dataclasses.replace(
            job(clipped), compile=lambda: {"run_eagerly": True}
        )
        found = same_numbers.on_zero(eager, 2, zero_stage=0)
        same_numbers.assert_same(self, one_device(clipped), found)

    def test_is_refused_under_another_strategy_of_replicas(self):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            model = model_of(clipped)
            model.compile("sgd", "mse")
        with self.assertRaisesRegex(TypeError, "Received: MirroredStrategy"):
            model.fit(**DATA, verbose=0)

    def test_is_refused_outside_of_replicas(self):
        with tfscale.MeshStrategy(tfscale.device_mesh(data=2)).scope():
            variable = keras.Variable([1.0])
            with self.assertRaisesRegex(
                ValueError, "called in replica context"
            ):
                tfscale.sum_gradients([tf.ones(1)], [variable])


class ShardsTest(parameterized.TestCase):
    def test_shards_that_meet_whole_variables_are_told_in_words(self):
        # TensorFlow said that dimensions must be equal, but are 4 and 8.
        for change in (decayed, sharpness_aware):
            with self.assertRaisesRegex(
                ValueError, "are shards.*tfscale.sum_gradients\\(gradients"
            ):
                fit_on(dict(model=2), change, sums=False)


def fit_on(axes, change, sums=True, **compile_):
    same_numbers.reset()
    layouts = LAYOUTS if "model" in axes else None
    with tfscale.MeshStrategy(tfscale.device_mesh(**axes), layouts).scope():
        model = model_of(change, sums)
        model.compile("sgd", "mse", **compile_)
    model.fit(**DATA, verbose=0)


if __name__ == "__main__":
    tf.test.main()
