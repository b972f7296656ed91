"""Every loss of `keras.losses`, on replicas and in microbatches.

A model has an output for each of a half of them, so that few traces are enough.
"""

import dataclasses
import functools
import inspect
import itertools

import keras
import numpy as np
import pytest
from absl.testing import parameterized

from tests import same_numbers
from tfscale._internals import releases

RANDOM = np.random.RandomState(0)
ROWS, CLASSES = 7, 4
LABELS = RANDOM.randint(0, CLASSES, ROWS)
REAL = RANDOM.normal(size=(ROWS, CLASSES)).astype("float32")
BITS = (REAL > 0).astype("float32")
ONE_HOT = np.eye(CLASSES, dtype="float32")[LABELS]
TOKENS = RANDOM.randint(1, 3, (ROWS, 2))

# Activation of the output, targets, and arguments of the loss.
LOSSES = {
    "BinaryCrossentropy": ("sigmoid", BITS, {}),
    "BinaryFocalCrossentropy": ("sigmoid", BITS, {}),
    "CTC": (None, TOKENS, {}),
    "CategoricalCrossentropy": ("softmax", ONE_HOT, {}),
    "CategoricalFocalCrossentropy": ("softmax", ONE_HOT, {}),
    "CategoricalGeneralizedCrossEntropy": ("softmax", LABELS, {}),
    "CategoricalHinge": (None, ONE_HOT, {}),
    "CosineSimilarity": (None, REAL, {}),
    "Dice": ("sigmoid", BITS, {"axis": -1}),
    "Hinge": (None, 2 * BITS - 1, {}),
    "Huber": (None, REAL, {}),
    "KLDivergence": ("softmax", ONE_HOT, {}),
    "LogCosh": (None, REAL, {}),
    "MeanAbsoluteError": (None, REAL, {}),
    "MeanAbsolutePercentageError": (None, REAL, {}),
    "MeanSquaredError": (None, REAL, {}),
    "MeanSquaredLogarithmicError": ("sigmoid", BITS, {}),
    "Poisson": ("softplus", BITS, {}),
    "SparseCategoricalCrossentropy": ("softmax", LABELS, {}),
    "SquaredHinge": (None, 2 * BITS - 1, {}),
    "Tversky": ("sigmoid", BITS, {"axis": -1}),
}
if not releases.IS_3_15:
    LOSSES["SparseCategoricalFocalCrossentropy"] = ("softmax", LABELS, {})
# What one device makes of the whole batch and no part of it can know.
OTHER_BY_NATURE = {
    "Circle": "compares each row with all others of the batch",
}
# By default these two are that as well: a quotient of sums over all rows, a
# scalar, which is warned of. With `axis` they have a value for each row.
REDUCED_BY_DEFAULT = ("Dice", "Tversky")


def losses_of(half):
    """Every other loss of the table."""
    return dict(itertools.islice(LOSSES.items(), half, None, 2))


def build(losses):
    inputs = keras.Input((5,))
    x = keras.layers.Dense(6, activation="tanh", name="shared")(inputs)
    outputs = []
    for name, (activation, _, _) in losses.items():
        size = 5 * 3 if name == "CTC" else CLASSES
        y = keras.layers.Dense(size, activation=activation, name=name)(x)
        outputs.append(keras.layers.Reshape((5, 3))(y) if size > 9 else y)
    return keras.Model(inputs, outputs)


def job(losses):
    return same_numbers.Job(
        functools.partial(build, losses),
        dict(
            x=RANDOM.normal(size=(ROWS, 5)).astype("float32"),
            y=[targets for _, targets, _ in losses.values()],
            batch_size=ROWS,
        ),
        loss=lambda: [
            getattr(keras.losses, name)(**options)
            for name, (_, _, options) in losses.items()
        ],
    )


class EveryLossTest(parameterized.TestCase):
    def test_each_is_in_a_table(self):
        names = {
            name
            for name, value in vars(keras.losses).items()
            if inspect.isclass(value) and issubclass(value, keras.Loss)
        }
        self.assertEqual(names - {"Loss"}, {*LOSSES, *OTHER_BY_NATURE})
        self.assertContainsSubset(REDUCED_BY_DEFAULT, LOSSES)

    @parameterized.product(
        train=(
            lambda job: same_numbers.on_ranks(job, 1, 2, layouts={}),
            lambda job: same_numbers.on_mesh(job, 1, 2, 2),
        ),
        half=(0, 1),
    )
    @pytest.mark.crossing(every=4)
    def test_all_are_those_of_one_device(self, train, half):
        every = job(losses_of(half))
        # Of one batch there are no other means: it may run by operations.
        expected = same_numbers.on_one_device(
            dataclasses.replace(every, compile=lambda: {"run_eagerly": True})
        )
        same_numbers.assert_same(self, expected, train(every))
