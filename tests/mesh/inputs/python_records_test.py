"""Records that Python makes are left as they are, and are not read ahead.

Replicas wrote over arrays that a generator yielded, under TensorFlow's
strategies too: after an epoch of slices of an array, targets were differences
of targets and predictions.
"""

import functools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tfscale

X = np.random.RandomState(0).normal(size=(32, 3)).astype("float32")


def aligned(values):
    """The values where TensorFlow takes memory as it is."""
    memory = np.zeros(values.nbytes + 64, "uint8")
    start = -memory.ctypes.data % 64
    array = memory[start : start + values.nbytes].view(values.dtype)
    array = array.reshape(values.shape)
    array[:] = values
    return array


class GeneratorInputsTest(absltest.TestCase):
    def test_arrays_that_are_yielded_stay_as_they_are(self):
        y = aligned(X[:, :1])

        def batches():
            for i in range(0, 32, 16):
                yield X[i : i + 16], y[i : i + 16]

        with tfscale.MeshStrategy(tfscale.device_mesh(data=2)).scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        dataset = tf.data.Dataset.from_generator(
            batches,
            output_signature=(tf.TensorSpec((16, 3)), tf.TensorSpec((16, 1))),
        )
        model.fit(dataset, steps_per_epoch=2, verbose=0)
        np.testing.assert_array_equal(y, X[:, :1])


class Endless(keras.utils.PyDataset):
    """Batches without an end."""

    num_batches = None

    def __getitem__(self, index):
        return X[:16], X[:16, :1]


class Finite(Endless):
    """A hundred batches, more than are read."""

    num_batches = 100


class Noting(keras.callbacks.Callback):
    """Calls a function after each batch that is not trained on."""

    def __init__(self, note):
        super().__init__()
        self._note = note

    def on_test_batch_end(self, batch, logs=None):
        self._note(batch)

    def on_predict_batch_end(self, batch, logs=None):
        self._note(batch)


class ReadAheadTest(parameterized.TestCase):
    def batches(self, count):
        for _ in range(count):
            self.num_drawn += 1
            yield X[:16], X[:16, :1]

    def drawn(self, strategy, read):
        """Batches that a generator has made after each step."""
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        self.num_drawn, found = 0, []

        def note(batch, logs=None):
            time.sleep(0.1)  # for reading ahead
            found.append(self.num_drawn)

        read(
            model,
            callbacks=[
                keras.callbacks.LambdaCallback(on_train_batch_end=note),
                Noting(note),
            ],
            verbose=0,
        )
        return found

    @parameterized.named_parameters(
        # Its last batches were read by the first validations, and `fit` ended
        # with a StopIteration.
        (
            "validation",
            lambda self, model, **kwargs: model.fit(
                *(X, X[:, :1]),
                epochs=3,
                validation_data=self.batches(6),
                validation_steps=2,
                **kwargs,
            ),
        ),
        (
            "fit",
            lambda self, model, **kwargs: model.fit(
                self.batches(100), steps_per_epoch=4, epochs=2, **kwargs
            ),
        ),
        (
            "evaluate",
            lambda self, model, **kwargs: model.evaluate(
                self.batches(100), steps=4, **kwargs
            ),
        ),
        (
            "predict",
            lambda self, model, **kwargs: model.predict(
                self.batches(100), steps=4, **kwargs
            ),
        ),
    )
    @pytest.mark.crossing(every=2)
    def test_a_generator_is_read_as_keras_reads_it(self, read):
        read = functools.partial(read, self)
        expected = self.drawn(tf.distribute.get_strategy(), read)
        mesh = tfscale.device_mesh(data=2)
        self.assertEqual(self.drawn(tfscale.MeshStrategy(mesh), read), expected)

    @parameterized.product(kind=(Endless, Finite), workers=(1, 2))
    @pytest.mark.crossing(every=4)
    def test_a_py_dataset_is_not_asked_between_epochs(self, kind, workers):
        # Its workers have stopped by then: "Iterator called after
        # on_epoch_end".
        with tfscale.MeshStrategy(tfscale.device_mesh(data=2)).scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")

        def wait(*args, **kwargs):
            time.sleep(0.05)

        history = model.fit(
            kind(workers=workers, max_queue_size=2),
            steps_per_epoch=3,
            epochs=4,
            validation_data=kind(workers=workers, max_queue_size=2),
            validation_steps=2,
            callbacks=[
                keras.callbacks.LambdaCallback(
                    on_train_batch_end=wait, on_epoch_end=wait
                ),
                Noting(wait),
            ],
            verbose=0,
        )
        self.assertLen(history.history["val_loss"], 4)
        self.assertEqual(model.optimizer.iterations, 12)


if __name__ == "__main__":
    absltest.main()
