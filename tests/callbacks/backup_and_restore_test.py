"""What is refused, said and reported; the kill matrix is in tests/backup."""

import contextlib
import glob
import logging
import os
import pathlib
import signal
import threading
import time
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests.backup import killed
from tests.backup import trainings
from tests.interruption import Interrupt
from tests.interruption import Interrupted
from tfscale.backup.files import committed
from tfscale.callbacks import BackupAndRestore

X, Y = np.ones((32, 3), "float32"), np.ones((32, 2), "float32")


def compiled(width=4, optimizer="sgd", functional=True, activation=None):
    first = [keras.Input((3,))] if functional else []
    layers = [keras.layers.Dense(width, activation), keras.layers.Dense(2)]
    model = keras.Sequential([*first, *layers])
    model.compile(optimizer, "mse")
    return model


def not_read_ahead(dataset):
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


class BackupAndRestoreTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = self.create_tempdir().full_path

    def interrupt(self, model, x=X, y=Y, after=3, **options):
        options = {"save_freq": 1, **options}
        with self.assertRaises(Interrupted):
            model.fit(
                *((x, y) if y is not None else (x,)),
                batch_size=None if y is None else 4,
                verbose=0,
                callbacks=[
                    BackupAndRestore(self.path, **options),
                    Interrupt(after),
                ],
            )

    def resume(self, model, x=X, y=Y, **options):
        return model.fit(
            *((x, y) if y is not None else (x,)),
            batch_size=None if y is None else 4,
            verbose=0,
            callbacks=[
                BackupAndRestore(self.path, save_freq=1, **options),
                Interrupt(-1),
            ],
        )

    @parameterized.parameters(
        (dict(save_freq=True), '"epoch", "auto" or a number'),
        (dict(save_freq=False), "Received: save_freq=False"),
        (dict(save_freq=0), "1 or more. Received: save_freq=0"),
        (dict(save_freq="batch"), "Received: save_freq='batch'"),
        (dict(keep=0), "Received: keep=0"),
        (dict(overhead=1.5), "between 0 and 1. Received: overhead=1.5"),
    )
    def test_bad_arguments_are_refused(self, arguments, message):
        with self.assertRaisesRegex((TypeError, ValueError), message):
            BackupAndRestore(self.path, **arguments)

    def test_a_second_one_is_refused_that_of_keras_too(self):
        for other in (BackupAndRestore, keras.callbacks.BackupAndRestore):
            both = [BackupAndRestore(self.path), other(self.path + "2")]
            with self.assertRaisesRegex(ValueError, "another BackupAndRestore"):
                compiled().fit(X, Y, verbose=0, callbacks=both)

    def test_evaluate_with_it_is_as_ever(self):
        model = compiled()
        expected = model.evaluate(X, Y, verbose=0)
        callback = BackupAndRestore(self.path)
        found = model.evaluate(X, Y, verbose=0, callbacks=[callback])
        self.assertEqual(found, expected)

    def test_another_model_or_optimizer_is_refused(self):
        self.interrupt(compiled(optimizer="adam"))
        for other, message in (
            (
                dict(width=5),
                r"\[3, 5\] float32, in the backup \[3, 4\] float32",
            ),
            (dict(optimizer="sgd"), "which the backup has"),
            # Of the same variables: these went on, and came out otherwise.
            (dict(optimizer="adamw"), 'class_name "AdamW", saved "Adam"'),
            (dict(activation="relu"), 'activation "relu", saved "linear"'),
        ):
            model = compiled(**{"optimizer": "adam", **other})
            with self.subTest(message), self.assert_refused(model, message):
                self.resume(model)

    @contextlib.contextmanager
    def assert_refused(self, model, message):
        """Neither the model nor any file is another one then."""

        def state():
            files = pathlib.Path(self.path).rglob("backup-*/*")
            return (
                [value.numpy() for value in model.variables],
                [value.numpy() for value in model.optimizer.variables],
                {str(file): file.read_bytes() for file in files},
            )

        model.optimizer.build(model.trainable_variables)
        killed.wait_for_saves()  # that of the run that was interrupted
        before = state()
        self.assertNotEmpty(before[-1])
        with self.assertRaisesRegex(ValueError, message) as raised:
            yield
        self.assertIn("Nothing was changed", str(raised.exception))
        self.assertAllEqual(model.optimizer.iterations, 0)
        after = state()
        for one, other in zip(before[:2], after[:2]):
            for value, expected in zip(one, other, strict=True):
                np.testing.assert_array_equal(value, expected)
        self.assertEqual(after[-1], before[-1])

    def test_other_data_is_refused(self):
        self.interrupt(compiled())
        model = compiled()
        with self.assert_refused(model, "'16 batches'.*'8 batches'"):
            self.resume(model, np.ones((64, 3)), np.ones((64, 2)))

    def test_data_in_another_order_is_refused(self):
        # Of as many batches: it went on with records it had seen before.
        def rows(seed):
            rows = tf.data.Dataset.from_tensor_slices((X, Y))
            return rows.shuffle(32, seed=seed).batch(4)

        self.interrupt(compiled(), rows(3), None)
        model = compiled()
        with self.assert_refused(model, r"4\].*, saved .*3\]"):
            self.resume(model, rows(4), None)

    def test_other_validation_data_is_said(self):
        def fit(after, rows):
            compiled().fit(
                *(X, Y),
                batch_size=16,
                epochs=3,
                validation_data=(X[:rows], Y[:rows]),
                verbose=0,
                callbacks=[
                    BackupAndRestore(self.path, save_freq=1),
                    Interrupt(after),
                ],
            )

        with self.assertRaises(Interrupted):
            fit(4, 32)
        with self.assertLogs(level="WARNING") as logs:
            fit(-1, 8)
        self.assertRegex(
            logs.output[-1], "validation data is not what it was: .*the last 8"
        )

    def test_callbacks_whose_state_is_lost_are_named(self):
        # Of subclasses of Keras' callbacks nothing was said.
        class Patient(keras.callbacks.EarlyStopping):
            pass

        class Logger(keras.callbacks.CSVLogger):
            pass

        class Saved(keras.callbacks.Callback):
            def get_state(self):
                return {}

        callbacks = [
            Patient("loss"),
            Logger(self.path + ".csv"),
            keras.callbacks.LambdaCallback(),
            Saved(),
            keras.callbacks.TerminateOnNaN(),
            BackupAndRestore(self.path),
        ]
        with self.assertLogs(level="WARNING") as logs:
            compiled().fit(X, Y, verbose=0, callbacks=callbacks)
        self.assertIn(
            "keeps no state of LambdaCallback, Logger beyond that of "
            "CSVLogger, Patient beyond that of EarlyStopping. ",
            logs.output[0],
        )

    def test_a_fit_of_fewer_epochs_than_were_trained_is_refused(self):
        # It made no step, and returned a model that was not trained.
        def fit(model, epochs, after):
            model.fit(
                *(X, Y),
                batch_size=16,
                epochs=epochs,
                verbose=0,
                callbacks=[BackupAndRestore(self.path, 1), Interrupt(after)],
            )

        with self.assertRaises(Interrupted):
            fit(compiled(), epochs=3, after=6)
        model = compiled()
        with self.assert_refused(model, "epochs=2, saved in epoch 3"):
            fit(model, epochs=2, after=-1)
        fit(model, epochs=3, after=-1)
        self.assertEqual(model.optimizer.iterations, 6)

    def test_an_execution_of_steps_that_were_made_in_part_is_refused(self):
        # It was skipped as a whole, with the batches that were not trained on.
        def with_executions(size):
            model = compiled()
            model.compile("sgd", "mse", steps_per_execution=size)
            return model

        self.interrupt(compiled(), after=4)  # 3 of 8 steps are saved
        model = with_executions(2)
        with self.assert_refused(model, "steps_per_execution=2, saved after 3"):
            self.resume(model)
        model = with_executions(3)
        self.resume(model)
        self.assertEqual(model.optimizer.iterations, 8)

    def test_metrics_with_a_value_for_each_class_go_on(self):
        # They are no floats, which an epoch that went on made of them.
        def measured():
            model = compiled()
            metrics = [keras.metrics.F1Score(name="f1")]
            model.compile("sgd", "mse", metrics=metrics)
            return model

        self.interrupt(measured())
        history = self.resume(measured()).history
        self.assertAllEqual(history["f1"][0].shape, [2])

    def test_other_callbacks_are_refused(self):
        self.interrupt(compiled())
        model = compiled()
        with self.assert_refused(model, "callbacks .* saved .*Interr"):
            model.fit(
                X,
                Y,
                batch_size=4,
                verbose=0,
                callbacks=[BackupAndRestore(self.path)],
            )

    def test_a_fit_that_failed_lets_go_of_folder_and_signals(self):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        callback = BackupAndRestore(self.path, save_freq=1)
        model = compiled()
        with self.assertRaises(Interrupted):
            model.fit(
                X,
                Y,
                batch_size=4,
                verbose=0,
                callbacks=[callback, Interrupt(3)],
            )
        self.resume(compiled())  # with a callback of its own
        self.assertIs(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)

    def test_a_signal_after_the_last_step_ends_the_process(self):
        # `fit` ended as if nothing had been, its backups were removed, and the
        # program went on until it was killed.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        term = keras.callbacks.LambdaCallback(
            on_test_begin=lambda logs: os.kill(os.getpid(), signal.SIGTERM)
        )
        with self.assertRaises(SystemExit) as ended:
            compiled().fit(
                X,
                Y,
                batch_size=4,
                verbose=0,
                validation_data=(X, Y),
                callbacks=[
                    BackupAndRestore(self.path, save_freq=2, exit_code=9),
                    term,
                ],
            )
        self.assertEqual(ended.exception.code, 9)
        self.assertNotEmpty(glob.glob(f"{self.path}/backup-*"))
        self.assertIs(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)

    def test_a_signal_of_a_fit_that_failed_ends_the_next_one(self):
        term = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: os.kill(
                os.getpid(), signal.SIGTERM
            )
        )
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with self.assertRaises(Interrupted):
            compiled().fit(
                X,
                Y,
                batch_size=4,
                verbose=0,
                callbacks=[BackupAndRestore(self.path), term, Interrupt(1)],
            )
        with self.assertRaises(SystemExit) as ended:
            self.resume(compiled())
        self.assertEqual(ended.exception.code, 128 + signal.SIGTERM)

    def test_a_failed_save_is_raised_at_a_later_step(self):
        def fail(*args):
            raise OSError("no space left")

        write = committed.write_shards
        committed.write_shards = fail
        self.addCleanup(setattr, committed, "write_shards", write)
        with self.assertRaisesRegex(
            OSError, "be saved. Received: no space left, after 1 steps, .* Free"
        ):
            compiled().fit(
                X,
                Y,
                batch_size=4,
                verbose=0,
                callbacks=[BackupAndRestore(self.path, save_freq=1)],
            )

    def test_a_fit_that_has_ended_well_does_not_fail_by_its_backups(self):
        def fail(*args):
            raise OSError("no space left")

        for module, name in (
            (committed, "write_shards"),
            (committed, "remove"),
        ):
            # The last save begins before the last step.
            with (
                mock.patch.object(module, name, fail),
                self.assertLogs(level="WARNING") as logs,
            ):
                model = compiled()
                backup = BackupAndRestore(self.path, save_freq=7)
                model.fit(X, Y, batch_size=4, verbose=0, callbacks=[backup])
            self.assertEqual(model.optimizer.iterations, 8)
            self.assertRegex(logs.output[-1], "ended well.*no space left")

    @parameterized.parameters("run[1]", "back\\slash")
    @pytest.mark.crossing(every=2)
    def test_a_run_in_a_folder_with_a_name_of_a_pattern_goes_on(self, name):
        self.path = f"{self.path}/{name}"
        self.interrupt(compiled())
        model = compiled()
        tfscale.export_backup(self.path, f"{self.path}.weights.h5", model)
        self.resume(model, delete_checkpoint=False)
        self.assertEqual(model.optimizer.iterations, 8)
        tfscale.export_backup(self.path, f"{self.path}.keras")

    def test_a_save_under_way_when_fit_failed_is_completed(self):
        # The next run found no backup, or one older, while it was written.
        def slowly(*args):
            time.sleep(0.3)
            return write(*args)

        write = committed.write_shards
        committed.write_shards = slowly
        self.addCleanup(setattr, committed, "write_shards", write)
        self.interrupt(compiled(), after=5, save_freq=4)
        with self.assertLogs(level="INFO") as logs:
            self.resume(compiled())
        self.assertIn("1 interruptions, 1 steps lost", logs.output[-1])

    def test_backups_are_removed_at_the_end_unless_told_otherwise(self):
        self.resume(compiled())
        self.assertEmpty(glob.glob(self.path + "/backup-*"))
        self.resume(compiled(), delete_checkpoint=False)
        self.assertNotEmpty(glob.glob(self.path + "/backup-*"))

    def test_the_same_model_goes_on_in_the_same_process(self):
        # As when a cell of a notebook is stopped, and run again. A `Sequential`
        # has got an input by then, and was taken for another model.
        model = compiled(functional=False)
        self.interrupt(model)
        self.resume(model)
        self.assertEqual(model.optimizer.iterations, 8)

    def test_a_later_fit_begins_where_it_is_told(self):
        self.interrupt(compiled())
        model = compiled()
        self.resume(model)
        history = model.fit(X, Y, epochs=2, verbose=0)
        self.assertEqual(history.epoch, [0, 1])

    def test_steps_of_tensorboard_go_on(self):
        steps = []

        class Recorded(trainings.ScalarBoard):
            def _scalar(self, name, value, step):
                if name == "batch_loss":
                    steps.append(step)

        def fit(after):
            callbacks = [
                BackupAndRestore(self.path, save_freq=1),
                Recorded(self.path, write_graph=False, update_freq=1),
                Interrupt(after),
            ]
            compiled().fit(X, Y, batch_size=4, verbose=0, callbacks=callbacks)

        with self.assertRaises(Interrupted):
            fit(after=3)
        fit(after=-1)
        # The third one was made, and not saved.
        self.assertEqual(steps, [1, 2, 3, 3, 4, 5, 6, 7, 8])

    def test_a_folder_that_cannot_be_written_to_is_said_before_training(self):
        file = self.path + "/file"
        with open(file, "w"):
            pass
        model = compiled()
        for path in (file, file + "/below", "/proc/backups"):
            with self.assertRaisesRegex(
                OSError, "`backup_dir` must be writable. Received: "
            ):
                model.fit(X, Y, verbose=0, callbacks=[BackupAndRestore(path)])
        self.assertEqual(model.optimizer.iterations, 0)

    def test_the_report_counts_what_was_lost(self):
        self.interrupt(compiled(), after=4, save_freq=3)
        with self.assertLogs(level="INFO") as logs:
            self.resume(compiled())
        self.assertRegex(
            logs.output[-1], "1 interruptions, 1 steps lost, .* goodput"
        )

    @parameterized.parameters(
        (lambda d: d.shuffle(9), "a `shuffle` has no seed"),
        (
            lambda d: d.map(
                lambda x, y: (
                    tf.ensure_shape(
                        tf.py_function(lambda v: v, [x], tf.float32), [3]
                    ),
                    y,
                )
            ),
            "Python functions",
        ),
        (lambda d: d, None),
        (lambda d: d.shuffle(9, seed=3), None),
    )
    def test_what_cannot_be_exact_is_said(self, change, reason):
        tf.random.set_seed(None)
        dataset = tf.data.Dataset.from_tensor_slices((X, Y))
        dataset = change(dataset).batch(16)
        with self.assertLogs(level="WARNING") as logs:
            logging.warning("at least one line")
            compiled().fit(
                dataset, verbose=0, callbacks=[BackupAndRestore(self.path)]
            )
        said = [line for line in logs.output if "After an inter" in line]
        self.assertLen(said, 1 if reason else 0)
        if reason:
            self.assertIn(reason, said[0])

    @parameterized.parameters(
        (lambda d: d, True),
        (lambda d: not_read_ahead(d), False),
        (lambda d: not_read_ahead(d).prefetch(1), True),
        (lambda d: not_read_ahead(d).map(lambda x, y: (x, y)), False),
        (lambda d: d.take(64), True),
    )
    @pytest.mark.crossing(every=5)
    def test_a_repeat_behind_a_shuffle_is_a_matter_of_luck(self, change, said):
        """TensorFlow itself trains on other data each time.

        It reads ahead. Of an iterator that is let go early, as after
        `validation_steps`, the next repetition has begun by then or not; if it
        has, the shuffle's seeds have moved on. Of 60 runs 17 differed.
        """
        rows = tf.data.Dataset.from_tensor_slices((X, Y))
        rows = change(rows.shuffle(32, seed=3).repeat()).batch(4)
        with self.assertLogs(level="WARNING") as logs:
            logging.warning("at least one line")
            compiled().fit(
                rows,  # of which there is one iterator
                steps_per_epoch=2,
                validation_data=rows,
                validation_steps=2,
                verbose=0,
                callbacks=[BackupAndRestore(self.path)],
            )
        logs = [line for line in logs.output if "matter of luck" in line]
        self.assertLen(logs, int(said))
        if said:
            self.assertIn("the validation data", logs[0])

    def test_a_save_holds_training_up_for_a_part_of_writing_it(self):
        model = keras.Sequential(
            [keras.Input((512,)), *[keras.layers.Dense(512)] * 2]
        )
        model.compile("sgd", "mse")
        write = committed.write_shards
        has_gone_on, waits = threading.Event(), []

        def slow(*args):
            waits.append(has_gone_on.wait(60.0))
            write(*args)

        committed.write_shards = slow
        self.addCleanup(setattr, committed, "write_shards", write)
        x = np.ones((8, 512), "float32")

        class Steps(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 3:
                    has_gone_on.set()

        callback = BackupAndRestore(self.path, save_freq=3)
        model.fit(x, x, batch_size=2, verbose=0, callbacks=[callback, Steps()])
        # The save is due before the fourth step, which does not wait for it.
        self.assertTrue(waits[0])


class ExportTest(tf.test.TestCase):
    def test_a_model_may_have_an_attribute_called_model(self):
        # It was taken for the model that a pipeline wraps.
        class Scored(keras.Model):
            def __init__(self, width=2):
                super().__init__()
                self.width = width
                self.model = keras.layers.Dense(width)

            def call(self, inputs):
                return self.model(inputs)

            def get_config(self):
                return {"width": self.width}

        path = self.create_tempdir().full_path
        model = Scored()
        model.compile("sgd", "mse")
        backup = BackupAndRestore(path, 2, delete_checkpoint=False)
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=[backup])
        with keras.saving.custom_object_scope({"Scored": Scored}):
            found = tfscale.export_backup(path, path + "/model.keras")
        self.assertIsInstance(found, Scored)

    def test_the_newest_backup_becomes_a_plain_model(self):
        path = self.create_tempdir().full_path
        model = compiled()
        model.fit(
            X,
            Y,
            batch_size=4,
            verbose=0,
            epochs=2,
            callbacks=[BackupAndRestore(path, delete_checkpoint=False)],
        )
        file = path + "/model.keras"
        tfscale.export_backup(path, file)
        loaded = keras.models.load_model(file)
        self.assertEqual(loaded.count_params(), model.count_params())
        weights = path + "/model.weights.h5"
        tfscale.export_backup(path, weights, compiled())
        self.assertTrue(os.path.exists(weights))
        with self.assertRaisesRegex(ValueError, "must be the model of the run"):
            tfscale.export_backup(path, weights, compiled(5))

    def test_without_a_backup_it_is_an_error(self):
        path = self.create_tempdir().full_path
        with self.assertRaisesRegex(FileNotFoundError, "must contain a backup"):
            tfscale.export_backup(path, path + "/model.keras")
        with self.assertRaisesRegex(ValueError, "must end in"):
            tfscale.export_backup(path, path + "/model.h5")


if __name__ == "__main__":
    tf.test.main()
