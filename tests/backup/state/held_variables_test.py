"""Variables are saved wherever a model holds them; the rest is named.

A run that was killed went on with other numbers where a loss, a nested dict or
a plain object had one, and nothing was said.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests.backup.killed import Killed
from tests.backup.killed import KilledAt
from tests.backup.killed import wait_for_saves
from tfscale.callbacks import BackupAndRestore

X, Y = np.ones((64, 2), "float32"), np.ones((64, 1), "float32")


class Plain:
    pass


class Growing(keras.losses.Loss):
    """Is larger by a factor in each step."""

    def __init__(self, holder):
        super().__init__()
        self.value = holder(tf.Variable(1.0, trainable=False))

    def call(self, y, p):
        VARIABLES[-1].assign_add(0.5)
        return tf.reduce_mean((y - p) ** 2, -1) * VARIABLES[-1]


VARIABLES = []


def nested(variable):
    return {"a": [(variable,)]}


def in_object(variable):
    plain = Plain()
    plain.inner = Plain()
    plain.inner.value = variable
    plain.inner.outer = plain
    return plain


class HeldVariablesTest(tf.test.TestCase, parameterized.TestCase):
    def fit(self, path, holder, kill=-1, place="loss"):
        keras.utils.set_random_seed(1)
        variable = tf.Variable(1.0, trainable=False)
        VARIABLES.append(variable)
        loss = Growing(lambda _: holder(variable) if place == "loss" else None)
        dense = keras.layers.Dense(1)
        if place == "layer":
            dense.held = holder(variable)
        model = keras.Sequential([keras.Input((2,)), dense])
        model.compile("sgd", loss)
        model.fit(
            *(X, Y),
            batch_size=8,
            verbose=0,
            shuffle=False,
            callbacks=[KilledAt(kill), BackupAndRestore(path, save_freq=2)],
        )
        return model.get_weights()[0]

    @parameterized.product(
        holder=[lambda v: v, nested, in_object], place=["loss", "layer"]
    )
    @pytest.mark.crossing(every=6)
    def test_a_run_that_goes_on_ends_alike(self, holder, place):
        path = self.create_tempdir().full_path
        whole = self.fit(f"{path}/whole", holder, place=place)
        with self.assertRaises(Killed):
            self.fit(f"{path}/runs", holder, kill=5, place=place)
        wait_for_saves()
        end = self.fit(f"{path}/runs", holder, place=place)
        np.testing.assert_array_equal(end, whole)
        self.assertEqual(VARIABLES[-1], 5.0)  # 8 steps

    def test_generators_of_python_are_named(self):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.layers[0].draws = [np.random.default_rng(0)]
        model.compile("sgd", "mse")
        path = self.create_tempdir().full_path
        with self.assertLogs(level="WARNING") as logs:
            model.fit(X, Y, verbose=0, callbacks=[BackupAndRestore(path)])
        said = [line for line in logs.output if "does not save" in line]
        self.assertLen(said, 1)
        self.assertRegex(said[0], r"draws/0 \(Generator\)")


if __name__ == "__main__":
    tf.test.main()
