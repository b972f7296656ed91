"""What a run cannot continue with bit for bit is said when it begins."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests.backup import trainings
from tfscale.callbacks import BackupAndRestore

X, Y = trainings.rows_of(1)


class Reordered(trainings.Rows):
    """Changes its order after each epoch, as many do."""

    def on_epoch_end(self):
        np.random.shuffle(self.order)

    order = np.arange(5)


def rows():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def pipeline(**options):
    source = tfscale.data.arrays(X, Y)
    return tfscale.data.pipeline(source, batch_size=8, **options)


class ExactnessTest(tf.test.TestCase, parameterized.TestCase):
    def said_of(self, data, **arguments):
        """The warnings of a `fit` about its data."""
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        backup = BackupAndRestore(self.create_tempdir().full_path)
        with self.assertLogs(level="WARNING") as logs:
            logging.warning("at least one line")
            model.fit(data, verbose=0, callbacks=[backup], **arguments)
        return [line for line in logs.output if "After an inter" in line]

    def assert_said(self, data, reason, **arguments):
        said = self.said_of(data, **arguments)
        self.assertLen(said, int(reason is not None))
        if reason is not None:
            self.assertIn(reason, said[0])

    @parameterized.parameters(
        (lambda: trainings.Rows(8), None),
        (lambda: Reordered(8), "what `on_epoch_end` of `Reordered` changes"),
        (lambda: trainings.generated(8), "a Python generator makes it"),
    )
    @pytest.mark.crossing(every=3)
    def test_data_of_python(self, make, reason):
        # Each epoch of a run that went on had other batches, in silence.
        self.assert_said(make(), reason, steps_per_epoch=2)

    @parameterized.parameters(
        (lambda: rows().shuffle(9, 3).cache().batch(8), "a `cache` keeps"),
        (lambda: rows().cache().shuffle(9, 3).batch(8), None),
        (
            lambda: (
                rows()
                .shuffle(9, 3, reshuffle_each_iteration=False)
                .cache()
                .batch(8)
            ),
            None,
        ),
        (lambda: pipeline().cache(), "a `cache` keeps"),
        (lambda: pipeline(shuffle=False).cache(), None),
        (lambda: pipeline(cache="memory"), None),
    )
    @pytest.mark.crossing(every=3)
    def test_a_cache_of_what_is_new_in_each_epoch(self, make, reason):
        # It keeps the first epoch. A run that went on had cached another one:
        # in the middle of an epoch it saw records twice, and others not.
        self.assert_said(make(), reason)

    @parameterized.parameters(True, False)
    def test_a_shuffle_of_training_and_validation_data(self, reshuffles):
        # Each validation moved its seeds, of which a run that went on knew
        # nothing: records of an epoch were trained on twice, or not at all.
        both = rows().shuffle(40, 3, reshuffle_each_iteration=reshuffles)
        self.assert_said(
            both.take(24).batch(8),
            "they share a `shuffle`" if reshuffles else None,
            validation_data=both.skip(24).batch(8),
        )

    @parameterized.parameters(True, False)
    def test_a_dataset_that_this_process_has_read_before(self, is_new):
        # As in a loop of retries: records were trained on twice in an epoch.
        def fit(data, interrupt_at=None):
            def interrupt(batch, logs):
                if batch == interrupt_at:
                    raise InterruptedError

            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse", run_eagerly=True)
            interruption = keras.callbacks.LambdaCallback(
                on_train_batch_end=interrupt
            )
            backup = BackupAndRestore(folder, save_freq=1)
            model.fit(data, verbose=0, callbacks=[interruption, backup])

        def shuffled():
            return rows().shuffle(40, 3).batch(8)

        folder = self.create_tempdir().full_path
        data = shuffled()
        with self.assertRaises(InterruptedError):
            fit(data, interrupt_at=2)
        with self.assertLogs(level="WARNING") as logs:
            fit(shuffled() if is_new else data)
        said = [line for line in logs.output if "as in a new process" in line]
        self.assertLen(said, 0 if is_new else 1)


if __name__ == "__main__":
    tf.test.main()
