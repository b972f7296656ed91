import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests import strategies
from tfscale.callbacks.input_wait import InputWait


def _dataset(milliseconds):
    def sleep(number):
        time.sleep(milliseconds / 1e3)
        return number

    rows = tf.ones([4, 8])
    return (
        tf.data.Dataset.range(20)
        .map(
            lambda i: (
                rows
                + 0
                * tf.cast(tf.numpy_function(sleep, [i], tf.int64), "float32"),
                rows,
            )
        )
        .map(lambda x, y: (tf.ensure_shape(x, [4, 8]), y))
    )


def _made_on_demand(milliseconds):
    """Batches that are begun when somebody asks, one at a time.

    A map would be made parallel by tf.data, and have its batches ready before
    anybody asks: then any way of counting finds no wait.
    """
    rows = np.ones([4, 8], "float32")

    def batches():
        for _ in range(20):
            time.sleep(milliseconds / 1e3)
            yield rows, rows

    spec = tf.TensorSpec([4, 8], tf.float32)
    dataset = tf.data.Dataset.from_generator(
        batches, output_signature=(spec, spec)
    )
    return dataset.apply(tf.data.experimental.assert_cardinality(20))


class Slow(keras.layers.Layer):
    """Takes its time on each replica."""

    def __init__(self, milliseconds):
        super().__init__()
        self._milliseconds = milliseconds

    def call(self, x):
        def sleep(x):
            time.sleep(self._milliseconds / 1e3)
            return x

        return tf.ensure_shape(tf.numpy_function(sleep, [x], x.dtype), x.shape)


def _model():
    model = keras.Sequential([keras.layers.Dense(8)])
    model.compile("sgd", "mse")
    return model


class InputWaitTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("one", "mirrored", "mesh")
    @pytest.mark.crossing(every=2)
    def test_warns_once_when_training_waits(self, strategy):
        wait = InputWait(threshold=0.3, num_steps=10)
        with strategies.named(strategy).scope():
            model = _model()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = model.fit(
                wait.watch(_dataset(60)), epochs=2, verbose=0, callbacks=[wait]
            )
        told = [w for w in caught if "waits for its input" in str(w.message)]
        self.assertLen(told, 1)
        self.assertGreater(min(history.history["input_wait"]), 0.3)

    @parameterized.product(ahead=[0, 1, 3], one_iterator=[False, True])
    def test_a_batch_taken_ahead_is_not_waited_for(self, ahead, one_iterator):
        # The hooks by hand: during each step arrives the batch of the step
        # itself, or one that is `ahead` of it.
        wait = InputWait()
        dataset = wait.watch(tf.data.Dataset.range(40))
        for epoch in range(2):
            if epoch == 0 or not one_iterator:
                batches = iter(dataset)
                for _ in range(ahead):
                    next(batches)
            wait.on_epoch_begin(epoch)
            for step in range(10):
                wait.on_train_batch_begin(step)
                time.sleep(0.01)
                next(batches)
                wait.on_train_batch_end(step)
            logs = {}
            wait.on_epoch_end(epoch, logs)
            if ahead:
                self.assertEqual(logs["input_wait"], 0.0)
            else:
                self.assertGreater(logs["input_wait"], 0.5)

    @parameterized.parameters("mirrored", "mesh")
    def test_is_silent_when_input_is_made_during_the_step(self, strategy):
        # A batch takes 100 ms, a step 120 ms or more: during each step arrives
        # a batch for a later one. On the CPU MeshStrategy takes no batch
        # ahead, so the dataset does.
        wait = InputWait(threshold=0.2, num_steps=5)
        dataset = _made_on_demand(100)
        if strategy == "mesh":
            dataset = dataset.prefetch(2)
        with strategies.named(strategy).scope():
            model = keras.Sequential([Slow(120), keras.layers.Dense(8)])
            model.compile("sgd", "mse")
        history = model.fit(wait.watch(dataset), verbose=0, callbacks=[wait])
        self.assertLess(history.history["input_wait"][0], 0.2)

    def test_is_silent_when_input_is_there(self):
        rows = tf.ones([4, 8])
        wait = InputWait(threshold=0.3, num_steps=10)
        model = keras.Sequential([Slow(40), keras.layers.Dense(8)])
        model.compile("sgd", "mse")
        dataset = tf.data.Dataset.from_tensors((rows, rows))
        history = model.fit(
            wait.watch(dataset.repeat(20)), verbose=0, callbacks=[wait]
        )
        self.assertLess(history.history["input_wait"][0], 0.3)

    def test_the_dataset_is_the_same(self):
        dataset = tf.data.Dataset.range(5).batch(2)
        watched = InputWait().watch(dataset)
        self.assertEqual(watched.cardinality(), 3)
        self.assertEqual(watched.element_spec, dataset.element_spec)
        for one, other in zip(dataset, watched, strict=True):
            self.assertAllEqual(one, other)

    def test_fit_without_watch_is_refused(self):
        with self.assertRaisesRegex(ValueError, "wait.watch"):
            _model().fit(_dataset(0), verbose=0, callbacks=[InputWait()])

    @parameterized.parameters({"threshold": 2.0}, {"num_steps": 0})
    def test_impossible_settings_are_refused(self, **kwargs):
        with self.assertRaisesRegex(ValueError, "threshold"):
            InputWait(**kwargs)


if __name__ == "__main__":
    absltest.main()
