"""What worker 0 gives to the others keeps its bits, in any dtype."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

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


if __name__ == "__main__":
    tf.test.main()
