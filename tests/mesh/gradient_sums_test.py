"""A `train_step` that changes gradients by hand has those of one device."""

import dataclasses
import functools
import warnings

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
from tfscale.step.checks import changed_gradients


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


def untouched(model, gradients, x, y):
    return gradients


def halved(model, gradients, x, y):
    return [-0.5 * g / 2.0 for g in gradients]


def clipped(model, gradients, x, y):
    return tf.clip_by_global_norm(gradients, 0.01)[0]


def clipped_by_value(model, gradients, x, y):
    return [tf.clip_by_value(g, -0.1, 0.1) for g in gradients]


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


def normed(model, gradients, x, y):
    norm = tf.function(lambda gradient: gradient / tf.norm(gradient))
    return [norm(gradient) for gradient in gradients]


def partly(model, gradients, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x))
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

    def test_a_second_sum_changes_nothing(self):
        def again(model, gradients, x, y):
            variables = model.trainable_variables
            gradients = tfscale.sum_gradients(gradients, variables)
            return clipped(model, gradients, x, y)

        found = same_numbers.on_ranks(job(again), 2, 2, LAYOUTS)
        same_numbers.assert_same(self, one_device(clipped), found)

    def test_sums_and_others_are_not_added(self):
        with self.assertRaisesRegex(ValueError, "must be summed.*up/kernel"):
            fit_on(dict(data=2), partly)

    def test_is_refused_in_microbatches(self):
        model = model_of(clipped)
        model.compile("sgd", "mse")
        callback = tfscale.callbacks.GradientAccumulation(4)
        with self.assertRaisesRegex(ValueError, "in a microbatch.*clipnorm"):
            model.fit(**DATA, callbacks=[callback], verbose=0)

    def test_is_refused_eagerly_on_several_devices(self):
        with self.assertRaisesRegex(ValueError, "eager call.*run_eagerly"):
            fit_on(dict(data=2), clipped, run_eagerly=True)

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
            with self.assertRaisesRegex(ValueError, "called by the replicas"):
                tfscale.sum_gradients([tf.ones(1)], [variable])


class Logging(Stepping):
    """Logs the norm of its gradients, and a loss with a tape of its own."""

    change = untouched

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            made = self(x, training=True)
        slope = tf.reduce_mean(tape.gradient(made, x) ** 2)
        gradients = self.gradients_of(x, y)
        self.optimizer.apply(gradients, self.trainable_variables)
        norm = tf.linalg.global_norm(gradients)
        return {"slope": slope, "norm": norm if self.logs else slope}


class LoggedTest(parameterized.TestCase):
    @parameterized.parameters(
        (dict(data=2), False, True, True),
        (dict(model=2), False, True, True),
        (dict(data=2), True, True, False),
        (dict(data=2), False, False, False),
        (dict(), False, True, False),
    )
    def test_a_norm_of_parts_is_warned_of(self, axes, sums, logs, expected):
        same_numbers.reset()
        layouts = LAYOUTS if "model" in axes else None
        kind = type("Model", (Logging,), {"logs": logs})
        with tfscale.MeshStrategy(tfscale.device_mesh(**axes), layouts).scope():
            model = model_of(untouched, sums, kind)
            model.compile("sgd", "mse")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model.fit(**DATA, verbose=0)
        texts = [str(w.message) for w in found]
        texts = {text for text in texts if "a `train_step` logs" in text}
        self.assertLen(texts, int(expected))
        for text in texts:
            self.assertIn("Received: 'norm', made of gradients of a", text)

    def test_a_norm_of_microbatches_is_warned_of(self):
        kind = type("Model", (Logging,), {"logs": True})
        model = model_of(untouched, False, kind)
        model.compile("sgd", "mse")
        callback = tfscale.callbacks.GradientAccumulation(4)
        with self.assertWarnsRegex(UserWarning, "'norm'.*of a microbatch"):
            model.fit(**DATA, verbose=0, callbacks=[callback])

    def test_shards_that_meet_whole_variables_are_told_in_words(self):
        # TensorFlow said that dimensions must be equal, but are 4 and 8.
        for change in (decayed, sharpness_aware):
            with self.assertRaisesRegex(
                ValueError, "are shards.*tfscale.sum_gradients\\(gradients"
            ):
                fit_on(dict(model=2), change, sums=False)


def fit_on(axes, change, sums=True, callbacks=(), build=None, **compile_):
    """What is warned of in a fit."""
    same_numbers.reset()
    layouts = LAYOUTS if "model" in axes else None
    with tfscale.MeshStrategy(tfscale.device_mesh(**axes), layouts).scope():
        model = build() if build else model_of(change, sums)
        model.compile("sgd", "mse", **compile_)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(**DATA, verbose=0, callbacks=list(callbacks))
    texts = {str(w.message) for w in found if "by hand" in str(w.message)}
    return texts


def sum_of_columns(gradients):
    return tf.reduce_sum(gradients[0] + gradients[1], 0)


class WarningTest(parameterized.TestCase):
    @parameterized.parameters(
        (dict(data=2), clipped, "replica, changed by L2Loss"),
        (dict(data=2), clipped_by_value, "replica, changed by Minimum"),
        (dict(data=2), decayed, "replica, changed by AddV2"),
        (dict(data=2), sharpness_aware, None),
        (dict(data=2), centralized, None),
        (dict(data=2), halved, None),
        (dict(data=2), untouched, None),
        (dict(model=2), clipped, "shards of variables, changed by L2Loss"),
        (dict(model=2), centralized, "shards of variables, changed by Mean"),
        (dict(model=2), clipped_by_value, None),
        (dict(model=2), halved, None),
        (dict(model=2), untouched, None),
        (dict(), clipped, None),
    )
    @pytest.mark.crossing(every=2)
    def test_says_what_is_made_of_parts(self, axes, change, received):
        found = fit_on(axes, change, sums=change is sharpness_aware)
        if received is None:
            self.assertEmpty(found)
            return
        (text,) = found
        self.assertIn(received, text)
        self.assertIn("tfscale.sum_gradients(gradients, variables)", text)

    @parameterized.parameters((untouched, None), (normed, "PartitionedCall"))
    def test_of_functions_those_of_the_forward_are_of_the_tape(
        self, change, received
    ):
        # Of a grouped convolution Keras makes one: a plain ConvNeXt was warned
        # of, because the tape calls the backward without a name of its own.
        def build():
            layer = keras.layers.Lambda(tf.function(tf.tanh), name="act")
            x = inputs = keras.Input((12,))
            x = layer(keras.layers.Dense(8, name="up")(x))
            kind = type("Model", (Stepping,), {"change": change, "sums": False})
            return kind(inputs, keras.layers.Dense(12, name="down")(x))

        found = fit_on(dict(data=2), change, build=build)
        self.assertLen(found, received is not None)
        for text in found:
            self.assertIn(f"changed by {received}", text)

    @parameterized.parameters((clipped, "L2Loss"), (halved, None))
    def test_of_microbatches(self, change, received):
        callback = tfscale.callbacks.GradientAccumulation(4)
        found = fit_on(dict(data=2), change, sums=False, callbacks=[callback])
        if received is None:
            self.assertEmpty(found)
            return
        (text,) = found
        self.assertIn(f"the rows of a microbatch, changed by {received}", text)
        self.assertIn("`clipnorm`", text)

    def test_before_they_are_summed(self):
        def change(model, gradients, x, y):
            gradients = clipped(model, gradients, x, y)
            variables = model.trainable_variables
            return tfscale.sum_gradients(gradients, variables)

        (text,) = fit_on(dict(data=2), change, sums=False)
        self.assertIn("L2Loss", text)

    def test_a_dim_that_is_not_known_is_no_other_one(self):
        # A fit of a language model of keras_hub was warned of.
        with tf.Graph().as_default():
            open_ = tf.compat.v1.placeholder_with_default(
                tf.ones([4, 3]), [4, None]
            )
            tensors = tf.ones([4, 3]), open_
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                loss = sum(tf.reduce_sum(x * x) for x in tensors)
            gradients = tape.gradient(loss, tensors)
            for change, is_one in ((tf.add_n, False), (sum_of_columns, True)):
                origin = changed_gradients.Origin(change(gradients))
                changed = origin.change(of_shards=True, of_rows=False)
                self.assertEqual(changed is not None, is_one)

    def test_the_second_gradients_of_a_functional_step_are_of_the_tape(self):
        # They come of sums through the forward, and are not sums.
        with tf.Graph().as_default():
            x = tf.ones([2])
            total = changed_gradients.as_sum(tf.ones([2]))
            with tf.GradientTape() as tape:
                moved = x + total
                tape.watch(moved)
                loss = tf.reduce_sum(moved * moved)
            origin = changed_gradients.Origin(tape.gradient(loss, moved))
            self.assertTrue(origin.is_of_tape)
            self.assertFalse(origin.is_sum)


if __name__ == "__main__":
    tf.test.main()
