"""A value is cut and put together as its sharding says."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.variables.sharding_test import SHARDINGS
from tfscale.variables.sharding import Sharding
from tfscale.variables.shards import shards
from tfscale.variables.shards import unshard


class ShardsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*SHARDINGS)
    def test_shards_make_up_the_value(self, shape, sizes, dims, local):
        sharding = Sharding(shape, 4, *sizes, *dims)
        value = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        cut = shards(tf.constant(value), sharding)
        for part, place in zip(cut, sharding.coordinates, strict=True):
            self.assertEqual(part.shape, local)
            np.testing.assert_array_equal(part, value[sharding.slices(*place)])
        np.testing.assert_array_equal(unshard(cut, sharding), value)


if __name__ == "__main__":
    tf.test.main()
