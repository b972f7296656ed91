"""What only the traced step leads to is saved, or named.

A global variable, or one of a closure, was lost without a word.
"""

import logging
import typing
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests.backup.killed import Killed
from tests.backup.killed import KilledAt
from tests.backup.killed import wait_for_saves
from tfscale.callbacks import BackupAndRestore
from tfscale.callbacks import GradientAccumulation

X, Y = np.ones((64, 2), "float32"), np.ones((64, 1), "float32")
COUNTERS: list[tf.Variable] = []


class Growing(keras.layers.Layer):
    """Reads and counts up variables that it does not hold."""

    def call(self, x):
        for index, counter in enumerate(COUNTERS):
            counter.assign_add(0.25 * (index + 1))
            x *= counter
        return x


class Drawing(keras.layers.Layer):
    def call(self, x):
        return x + tf.random.uniform(tf.shape(x))


class InPython(keras.layers.Layer):
    def call(self, x):
        y = tf.numpy_function(np.negative, [x], x.dtype)
        return x + tf.stop_gradient(tf.ensure_shape(y, x.shape))


class Counted(keras.Model):
    """Counts in what no backup has, by a function for each kind of step."""

    counts: typing.ClassVar[dict] = {}

    def train_step(self, data):
        self.counts.get("training", lambda: None)()
        return super().train_step(data)

    def test_step(self, data):
        self.counts.get("validation", lambda: None)()
        return super().test_step(data)


def in_table():
    table = tf.lookup.experimental.MutableHashTable("int64", "int64", 0)

    def count():
        key = tf.constant([1], "int64")
        table.insert(key, table.lookup(key) + 1)

    return count


def in_iterator():
    iterator = iter(tf.data.Dataset.range(9))
    return lambda: next(iterator)


def in_variable():
    variable = tf.Variable(1.0, name="of_validation")
    return lambda: variable.assign_add(1.0)


def in_kernel():
    return lambda: tf.debugging.assert_non_negative(tf.random.uniform(()))


class OfGenerators(keras.layers.Layer):
    """Draws from what is saved."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)
        self.generator = tf.random.Generator.from_seed(2)

    def call(self, x):
        return (
            x
            + keras.random.normal((2,), seed=self.seeds)
            + self.generator.normal((2,))
        )


class CapturedVariablesTest(tf.test.TestCase, parameterized.TestCase):
    def fit(self, path, mesh=None, kill=-1, callbacks=(), steps=1):
        keras.utils.set_random_seed(1)
        strategy = tf.distribute.get_strategy()
        if mesh:
            strategy = tfscale.MeshStrategy(tfscale.device_mesh(**mesh))
        # One that no strategy knows of, and two of one name.
        COUNTERS[:] = [tf.Variable(1.0, trainable=False)]
        with strategy.scope():
            for _ in range(2):
                COUNTERS.append(tf.Variable(1.0, trainable=False, name="count"))
            model = keras.Sequential(
                [
                    keras.Input((2,)),
                    keras.layers.Dense(2),
                    Growing(),
                    keras.layers.Dense(1),
                ]
            )
            if mesh and "pipeline" in mesh:
                model = tfscale.PipelineModel(model, num_microbatches=2)
            model.compile(
                keras.optimizers.SGD(1e-6), "mse", steps_per_execution=steps
            )
        with warnings.catch_warnings():
            # They are counted up in each microbatch.
            warnings.filterwarnings("ignore", ".*which each call changes")
            model.fit(
                *(X, Y),
                batch_size=8,
                verbose=0,
                shuffle=False,
                callbacks=[
                    *(callback() for callback in callbacks),
                    KilledAt(kill),
                    BackupAndRestore(path, save_freq=2),
                ],
            )
        weights = [w.numpy() for w in model.trainable_variables]
        return [*weights, *(counter.numpy() for counter in COUNTERS)]

    @parameterized.named_parameters(
        ("one_device",),
        ("replicas", {"data": 2}),
        ("stages", {"pipeline": 2}),
        ("microbatches", None, [lambda: GradientAccumulation(2)]),
        ("steps_of_several_batches", None, [], 2),
    )
    @pytest.mark.crossing(every=5)
    def test_a_run_that_goes_on_ends_as_one_that_was_not_killed(
        self, mesh=None, callbacks=(), steps=1
    ):
        path = self.create_tempdir().full_path
        arguments = {"mesh": mesh, "callbacks": callbacks, "steps": steps}
        whole = self.fit(f"{path}/whole", **arguments)
        with self.assertRaises(Killed):
            self.fit(f"{path}/runs", kill=5, **arguments)
        wait_for_saves()
        end = self.fit(f"{path}/runs", **arguments)
        for value, expected in zip(end, whole, strict=True):
            np.testing.assert_array_equal(value, expected)

    def test_a_backup_of_replicas_goes_on_in_stages(self):
        path = self.create_tempdir().full_path
        with self.assertRaises(Killed):
            self.fit(path, {"data": 2}, kill=5)
        wait_for_saves()
        end = self.fit(path, {"pipeline": 2})
        # 4 steps of 2 replicas, which share what no strategy knows of, and
        # 4 of 2 microbatches.
        self.assertAllClose(end[-3], 1 + 0.25 * (4 * 2 + 4 * 2))

    def messages_of_fit(self, *layers, run_eagerly=False):
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(2), *layers]
        )
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
        path = self.create_tempdir().full_path
        with self.assertLogs(level="WARNING") as logs:
            logging.warning("One is needed.")
            model.fit(X, X, verbose=0, callbacks=[BackupAndRestore(path)])
        return [line for line in logs.output if "BackupAndRestore" in line]

    def test_random_operations_without_a_generator_are_named(self):
        (said,) = self.messages_of_fit(Drawing(name="draws"))
        self.assertRegex(said, "RandomUniform at .*draws.*SeedGenerator")

    def test_python_functions_are_named(self):
        (said,) = self.messages_of_fit(InPython(name="calls"))
        self.assertRegex(said, "Python functions.*calls.*tf.Variable")

    def test_a_step_that_is_not_traced_is_said(self):
        (said,) = self.messages_of_fit(run_eagerly=True)
        self.assertIn("run_eagerly=True", said)

    def messages_of_counts(self, **counts):
        inputs = keras.Input((2,))
        model = Counted(inputs, keras.layers.Dense(2)(inputs))
        model.counts = counts
        model.compile("sgd", "mse")
        path = self.create_tempdir().full_path
        with self.assertLogs(level="WARNING") as logs:
            logging.warning("One is needed.")
            model.fit(
                *(X, X),
                verbose=0,
                validation_data=(X, X),
                callbacks=[BackupAndRestore(path)],
            )
        return [line for line in logs.output if "BackupAndRestore" in line]

    @parameterized.parameters(
        (in_table, "LookupTableInsertV2 at "),
        (in_iterator, "an iterator that the step calls `next` on"),
    )
    def test_what_changes_and_is_no_variable_is_named(self, make, words):
        # A second dataset that a step reads began again without a word.
        (said,) = self.messages_of_counts(training=make())
        self.assertIn(words, said)

    @parameterized.parameters(
        (in_table, "LookupTableInsertV2 at "),
        (in_kernel, "RandomUniform at "),
        (in_variable, "'of_validation:0'"),
    )
    def test_what_only_a_validation_uses_is_named(self, make, words):
        (said,) = self.messages_of_counts(validation=make())
        self.assertIn(words, said)

    def test_what_training_and_validation_use_is_saved(self):
        count = in_variable()
        self.assertEmpty(self.messages_of_counts(training=count))
        said = self.messages_of_counts(training=count, validation=count)
        self.assertEmpty(said)

    def test_nothing_is_said_of_generators_that_are_saved(self):
        layers = keras.layers.Dropout(0.5), OfGenerators()
        self.assertEmpty(self.messages_of_fit(*layers))


if __name__ == "__main__":
    tf.test.main()
