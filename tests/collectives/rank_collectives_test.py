"""What ranks exchange, forward and backward, against tensors made by hand."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tfscale.collectives import rank_collectives

# Replicas and ranks.
SIZES = ((1, 2), (1, 3), (1, 4), (2, 2))


def part(value, index, count):
    return np.split(value, count, axis=1)[index]


def own(values, rank):
    return values[rank]


def total(values, rank):
    return sum(values)


def joined(values, rank):
    return np.concatenate(values, axis=1)


def local_shard(values, rank):
    return part(values[rank], rank, len(values))


def part_of_total(values, rank):
    return part(sum(values), rank, len(values))


# Operator, forward, backward: each of the tensors of all ranks, and the rank.
OPERATORS = {
    "copy_to_ranks": (rank_collectives.copy_to_ranks, own, total),
    "reduce_from_ranks": (rank_collectives.reduce_from_ranks, total, own),
    "total_over_ranks": (rank_collectives.total_over_ranks, total, total),
    "scatter_to_ranks": (
        lambda x: rank_collectives.scatter_to_ranks(x, 1),
        local_shard,
        joined,
    ),
    "gather_from_ranks": (
        lambda x: rank_collectives.gather_from_ranks(x, 1),
        joined,
        local_shard,
    ),
    "reduce_scatter": (
        lambda x: rank_collectives.reduce_scatter(x, 1),
        part_of_total,
        joined,
    ),
    "all_gather": (
        lambda x: rank_collectives.all_gather(x, 1),
        joined,
        part_of_total,
    ),
}
FORWARD_ONLY = {
    "sum_over_ranks": (rank_collectives.sum_over_ranks, total),
    "max_over_ranks": (
        rank_collectives.max_over_ranks,
        lambda values, rank: np.max(values, axis=0),
    ),
    "local_shard": (lambda x: rank_collectives.local_shard(x, 1), local_shard),
    "concat_over_ranks": (
        lambda x: rank_collectives.concat_over_ranks(x, 1),
        joined,
    ),
    "local_shard_of_sum": (
        lambda x: rank_collectives.local_shard_of_sum(x, 1),
        part_of_total,
    ),
}


def strategy(num_replicas, num_ranks):
    # All variables replicated: there are none.
    return tfscale.MeshStrategy(
        tfscale.device_mesh(data=num_replicas, model=num_ranks), {}
    )


def on_each(num_replicas, num_ranks, compute):
    """`compute(replica, rank)` of all ranks, where `run` returns the first's.

    Returns:
        `values[replica][rank]`, and the devices likewise.
    """
    mesh_strategy = strategy(num_replicas, num_ranks)
    devices = {}

    @tf.function(autograph=False)
    def step():
        results = {}

        def of_rank():
            context = tf.distribute.get_replica_context()
            replica = tf.get_static_value(context.replica_id_in_sync_group)
            place = int(replica), rank_collectives.rank()
            results[place] = compute(*place)
            devices[place] = tf.nest.map_structure(
                lambda x: x.device, results[place]
            )

        mesh_strategy.run(of_rank)
        return results

    def nested(found):
        return [
            [found[replica, rank] for rank in range(num_ranks)]
            for replica in range(num_replicas)
        ]

    values = {
        place: tf.nest.map_structure(lambda x: x.numpy(), value)
        for place, value in step().items()
    }
    return nested(values), nested(devices)


def integers(seed, num_replicas, num_ranks, columns):
    """Different ones on each rank: sums of them are exact."""
    shape = (num_replicas, num_ranks, 2, columns)
    random = np.random.RandomState(seed)
    return random.randint(-50, 50, shape).astype("float32")


class CollectivesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(name=list(OPERATORS), size=SIZES)
    @pytest.mark.crossing(every=4)
    def test_forward_and_backward(self, name, size):
        operator, forward, backward = OPERATORS[name]
        num_replicas, num_ranks = size
        x = integers(0, *size, 2 * num_ranks)
        expected = [
            [forward(list(of), rank) for rank in range(num_ranks)] for of in x
        ]
        dy = integers(1, *size, expected[0][0].shape[1])

        def compute(replica, rank):
            value = tf.constant(x[replica, rank])
            given = tf.constant(dy[replica, rank])
            with tf.GradientTape() as outer:
                outer.watch(given)
                with tf.GradientTape() as tape:
                    tape.watch(value)
                    y = operator(value)
                dx = tape.gradient(y, value, output_gradients=given)
            # The backward is the transpose: its own transpose is the forward.
            again = outer.gradient(dx, given, output_gradients=value)
            return y, dx, again

        found, _ = on_each(*size, compute)
        for replica in range(num_replicas):
            for rank in range(num_ranks):
                y, dx, again = found[replica][rank]
                np.testing.assert_array_equal(y, expected[replica][rank])
                np.testing.assert_array_equal(again, expected[replica][rank])
                np.testing.assert_array_equal(
                    dx, backward(list(dy[replica]), rank)
                )

    @parameterized.product(name=list(FORWARD_ONLY), size=SIZES)
    @pytest.mark.crossing(every=4)
    def test_forward(self, name, size):
        operator, forward = FORWARD_ONLY[name]
        x = integers(0, *size, 2 * size[1])
        found, _ = on_each(
            *size, lambda replica, rank: operator(tf.constant(x[replica, rank]))
        )
        for values, of in zip(found, x, strict=True):
            for rank, value in enumerate(values):
                np.testing.assert_array_equal(value, forward(list(of), rank))

    def test_by_hand(self):
        # Two replicas of two ranks: what they hold, and what they get.
        x = [[[1.0, 2.0], [10.0, 20.0]], [[3.0, 4.0], [30.0, 40.0]]]
        sums = [[[11.0, 22.0], [11.0, 22.0]], [[33.0, 44.0], [33.0, 44.0]]]
        parts = [[[11.0], [22.0]], [[33.0], [44.0]]]

        def compute(replica, rank):
            value = tf.constant(x[replica][rank])
            return (
                rank_collectives.reduce_from_ranks(value),
                rank_collectives.reduce_scatter(value, 0),
            )

        found, _ = on_each(2, 2, compute)
        for replica in range(2):
            for rank in range(2):
                y, scattered = found[replica][rank]
                self.assertAllEqual(y, sums[replica][rank])
                self.assertAllEqual(scattered, parts[replica][rank])

    @parameterized.parameters(*OPERATORS)
    def test_every_rank_computes_on_its_own_device(self, name):
        operator = OPERATORS[name][0]

        def compute(replica, rank):
            value = tf.constant([[1.0, 2.0]])
            with tf.GradientTape() as tape:
                tape.watch(value)
                y = operator(value)
            return y, tape.gradient(y, value)

        _, devices = on_each(2, 2, compute)
        self.assertEqual(
            [
                [{d[-1] for d in of_rank} for of_rank in ranks]
                for ranks in devices
            ],
            [[{"0"}, {"1"}], [{"2"}, {"3"}]],
        )

    @parameterized.parameters(*OPERATORS)
    def test_one_rank_gets_what_it_gave(self, name):
        x = tf.constant([[1.0, 2.0]])
        operator = OPERATORS[name][0]
        self.assertAllEqual(operator(x), x)
        found, _ = on_each(2, 1, lambda *place: operator(x))
        for values in found:
            self.assertAllEqual(values[0], x)

    def test_two_models_meet_in_one_step(self):
        # Each meeting takes what was given to it and to no other one.
        def compute(replica, rank):
            value = tf.constant(float(rank + 1))
            first = rank_collectives.sum_over_ranks(value)
            second = rank_collectives.sum_over_ranks(first * value)
            return first, second

        found, _ = on_each(1, 3, compute)
        self.assertEqual(found, [[(6.0, 36.0)] * 3])

    def test_local_shards_ends_with_its_block(self):
        self.assertFalse(rank_collectives.reads_shards())
        with rank_collectives.local_shards():
            with rank_collectives.local_shards():
                self.assertTrue(rank_collectives.reads_shards())
            self.assertTrue(rank_collectives.reads_shards())
        self.assertFalse(rank_collectives.reads_shards())


if __name__ == "__main__":
    tf.test.main()
