"""What workers exchange has the values of its dtype."""

import functools
import types

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import crossings
from tfscale.collectives import workers

DTYPES = (
    *(tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32),
    *(tf.int64, tf.uint64, tf.float16, tf.bfloat16, tf.float32, tf.float64),
    *(tf.complex64, tf.complex128),
)


class BitsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(dtype=DTYPES, shape=[(), (3,), (2, 0), (2, 3)])
    def test_a_sum_with_zeros_gives_back_all_bits(self, dtype, shape):
        numbers = np.random.RandomState(0).randint(-100, 100, shape)
        value = tf.cast(numbers, dtype)
        bits = workers._as_integers(value)
        found = workers._from_integers(bits + tf.zeros_like(bits), dtype)
        self.assertEqual(found.dtype, dtype)
        self.assertEqual(found.shape, value.shape)
        self.assertEqual(found.numpy().tobytes(), value.numpy().tobytes())

    def test_a_nan_keeps_its_payload(self):
        value = tf.bitcast(tf.constant([0x7FA01234, -0x7FFFFFFF]), tf.float32)
        bits = workers._as_integers(value)
        found = workers._from_integers(bits, tf.float32)
        self.assertEqual(found.numpy().tobytes(), value.numpy().tobytes())


@functools.cache
def alone():
    """A group of one worker, whose collectives give back what they are given.

    One for all tests: the numbers of its collectives are used once.
    """
    joined = types.SimpleNamespace(
        cluster=types.SimpleNamespace(addresses=["here"]),
        coordination=types.SimpleNamespace(index=0, num_checks=0),
        failure_detector=types.SimpleNamespace(
            check_all_there=None, naming_lost=None
        ),
    )
    return workers.Workers(joined)


class DtypesTest(tf.test.TestCase, parameterized.TestCase):
    # Complex numbers went as whole numbers: without fraction and i. Tensors of
    # several ranks, gathered outside of a function, ended in a `TypeError`, and
    # an axis that was counted from the end in a `ValueError` of a transpose.
    @parameterized.parameters(
        *crossings.pairs(
            dtype=DTYPES, shape=[(), (3,), (2, 3)], is_known=[True, False]
        )
    )
    @pytest.mark.crossing(every=7)
    def test_numbers_keep_their_values(self, dtype, shape, is_known):
        numbers = np.random.RandomState(0).randint(0, 100, shape)
        value = tf.cast(numbers, dtype)
        if dtype.is_complex:
            value = tf.complex(*[tf.math.real(value) + 0.25] * 2)
        group = alone()

        def exchange(x):
            pack = [tf.constant([2.0, 3.0]), x, x]
            others, *sums = group.all_reduce(pack)
            axes = range(-len(shape), len(shape))
            gathered = [group.all_gather(x, i) for i in axes]
            return others, [*sums, *gathered]

        if not is_known:
            spec = tf.TensorSpec([None] * len(shape), dtype)
            exchange = tf.function(exchange, input_signature=[spec])
        others, found = exchange(value)
        self.assertAllEqual(others, [2.0, 3.0])
        for result in found:
            self.assertEqual(result.dtype, dtype)
            self.assertAllEqual(result, value)


if __name__ == "__main__":
    tf.test.main()
