"""What a device has of a variable, in integers."""

import dataclasses
import itertools

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from tfscale.variables.sharding import Sharding

# Whole shape; sizes of the axes; dims that they divide; what a device has.
SHARDINGS = (
    ((8, 6), (1, 1), (None, None), (8, 6)),
    ((8, 6), (2, 3), (None, None), (8, 6)),
    ((8, 6), (2, 3), (1, None), (8, 2)),
    ((8, 6), (2, 3), (1, 0), (4, 2)),
    ((8, 6), (2, 3), (None, 0), (4, 6)),
    # Both divide the same dim: a part of a shard.
    ((12, 5), (2, 3), (0, 0), (2, 5)),
    ((), (2, 2), (None, None), ()),
)


class ShardingTest(parameterized.TestCase):
    @parameterized.parameters(*SHARDINGS)
    def test_slices_are_all_of_the_variable(self, shape, sizes, dims, local):
        sharding = Sharding(shape, 4, *sizes, *dims)
        self.assertEqual(sharding.local_shape, local)
        self.assertEqual(sharding.is_sharded, local != shape)
        self.assertEqual(sharding.local_bytes, 4 * np.prod(local, dtype=int))
        places = list(sharding.coordinates)
        self.assertEqual(places, list(itertools.product(*map(range, sizes))))
        seen = np.zeros(shape, int)
        for place in places:
            slices = sharding.slices(*place)
            self.assertEqual(seen[slices].shape, local)
            seen[slices] += 1
        # Each element on as many devices as no axis divides.
        copies = [n for n, dim in zip(sizes, dims[::-1]) if dim is None]
        np.testing.assert_array_equal(seen, np.prod(copies, dtype=int))

    def test_a_part_is_of_the_shard_of_its_rank(self):
        sharding = Sharding((12,), 4, 2, 3, model_dim=0, data_dim=0)
        values = np.arange(12)
        self.assertEqual(
            [
                values[sharding.slices(*each)].tolist()
                for each in sharding.coordinates
            ],
            [[0, 1], [4, 5], [8, 9], [2, 3], [6, 7], [10, 11]],
        )

    @parameterized.parameters(
        ((6, 4), 2, 0),
        ((5, 4), 2, 1),
        ((5, 7), 2, None),
        ((), 2, None),
        ((0, 4), 2, 1),
        ((3, 2, 9), 3, 0),
        # One replica has all.
        ((6, 4), 1, None),
    )
    def test_states_are_divided_along_the_first_dim_that_replicas_divide(
        self, shape, num_replicas, dim
    ):
        sharding = Sharding(shape, 4, num_replicas)
        self.assertEqual(sharding.over_data().data_dim, dim)

    def test_states_of_a_shard_are_divided_along_a_dim_of_the_shard(self):
        sharding = Sharding((4, 6), 4, 4, 2, model_dim=0)
        self.assertIsNone(sharding.over_data().data_dim)
        sharding = dataclasses.replace(sharding, shape=(8, 6))
        self.assertEqual(sharding.over_data().local_shape, (1, 6))


if __name__ == "__main__":
    absltest.main()
