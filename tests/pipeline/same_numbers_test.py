"""A pipeline has the numbers of one device: sizes, schedules, recomputation."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
from absl.testing import parameterized

from tests import crossings
from tests import same_numbers

# Stages, microbatches, data replicas; rows of an epoch, in batches of 16. Of
# 34 rows the last batch is smaller than the number of microbatches, and that
# number divides no batch; of 33, one replica gets no row of the last batch.
SIZES = (
    (1, 4, 1, 48),
    (2, 1, 1, 48),
    (2, 4, 1, 48),
    (2, 3, 1, 34),
    (3, 4, 1, 48),
    (4, 8, 1, 48),
    (2, 4, 2, 33),
)
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


def build():
    """Five layers with weights, the first a lookup, and two skips."""
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(5, 8)(tokens)
    h = keras.layers.Dense(8, activation="tanh")(x)
    x = keras.layers.Add()([x, h])
    h = keras.layers.Dense(8, activation="tanh")(x)
    x = keras.layers.Add()([x, h])
    x = keras.layers.Dense(4)(keras.layers.Flatten()(x))
    return keras.Model(tokens, keras.layers.Dense(3)(x))


def job(optimizer, rows):
    random = np.random.RandomState(0)
    return same_numbers.Job(
        build,
        dict(
            x=random.randint(0, 5, (rows, 6)),
            y=random.randint(0, 3, rows),
            batch_size=16,
        ),
        OPTIMIZERS[optimizer],
        lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        lambda: dict(metrics=["accuracy"]),
    )


@functools.cache
def one_device(optimizer, rows):
    return same_numbers.on_one_device(job(optimizer, rows))


class SizesTest(parameterized.TestCase):
    @parameterized.parameters(
        *crossings.pairs(
            size=SIZES,
            schedule=("gpipe", "1f1b"),
            recompute=(False, True),
            optimizer=("sgd", "adam"),
        )
    )
    @pytest.mark.crossing(every=14)
    def test_three_steps(self, size, schedule, recompute, optimizer):
        *mesh, rows = size
        actual = same_numbers.on_mesh(
            job(optimizer, rows),
            *mesh,
            schedule=schedule,
            recompute=recompute,
        )
        same_numbers.assert_same(self, one_device(optimizer, rows), actual)


class HarnessTest(parameterized.TestCase):
    """The harness itself fails where it has to."""

    @parameterized.parameters("initial", "variables", "slots", "logs")
    def test_one_wrong_number_fails(self, what):
        expected = one_device("adam", 48)
        wrong = getattr(expected, what)
        if what == "slots":
            wrong = [(path, np.array(value)) for path, value in wrong]
            wrong[-1][1].flat[-1] += 2e-5 * np.abs(wrong[-1][1]).max()
        else:
            wrong = {name: np.array(value) for name, value in wrong.items()}
            last = list(wrong.values())[-1]
            last.flat[-1] += 2e-5 * np.abs(last).max() + 1e-9
        wrong = dataclasses.replace(expected, **{what: wrong})
        same_numbers.assert_same(self, expected, expected)
        with self.assertRaises(AssertionError):
            same_numbers.assert_same(self, expected, wrong)
