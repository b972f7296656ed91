"""Random numbers of replicas and ranks: what is each one's own, and what alike.

All devices have the same state of each `keras.random.SeedGenerator`. A replica
puts its number into the seeds, because its rows are not another replica's; the
first one leaves them as they are, which are those of one device. The ranks of a
replica so draw the same mask for an activation that is the same on all of them.
Where a draw is for a rank's part of a sharded activation, the rank goes into
the seed too:

    state ─► seed of the replica ─► draw               replicated activation
    state ─► seed of the replica ─► fold in the rank ─► draw        sharded one

as with the two states of random generators in Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models (2022), and Megatron-LM's
`get_cuda_rng_tracker`. The state goes on as on one device in all cases.
"""

import contextlib
from collections.abc import Callable

import keras
import tensorflow as tf

from tfscale import _internals
from tfscale import in_place
from tfscale import rank_context
from tfscale.tensor_parallel import collectives
from tfscale.tensor_parallel.sequence_parallel import sequence


def generators(layer) -> list[keras.random.SeedGenerator]:
    """All seed generators of a layer and of the layers in it."""
    return [
        generator
        for part in _internals.flatten_layers(layer)
        for generator in _internals.own_generators(part)
    ]


def attach(
    generator: keras.random.SeedGenerator,
    is_for_shard: Callable[[], bool] | None = None,
) -> None:
    """Makes seeds depend on the replica, and on the rank for its shard.

    Args:
        generator: The generator.
        is_for_shard: Says whether a draw is for a shard, in the model that is
            being called.
    """
    said = {} if is_for_shard is None else {"is_for_shard": is_for_shard}
    in_place.put(generator, RankedGenerator, **said)


@contextlib.contextmanager
def of_shards():
    """Within it, attached generators draw for this rank's shard."""
    with rank_context.within(seeds_are_for_shards=True):
        yield


class RankedGenerator(in_place.Mixin):
    """A generator on replicas and ranks, put in the place of Keras' class.

    Attributes:
        is_for_shard: See `attach`.
    """

    is_for_shard: Callable[[], bool] = staticmethod(lambda: False)

    def next(self, ordered=True):
        """See `keras.random.SeedGenerator`; a seed for whole or part."""
        seed = _of_replica(super().next(ordered))
        if collectives.num_ranks() == 1:
            return seed
        plan = sequence.current()
        is_part = (
            rank_context.current().shards.seeds_are_for_shards
            or (plan is not None and id(self.state) in plan.sharded_generators)
            or self.is_for_shard()
        )
        return _with(collectives.rank(), seed) if is_part else seed


def _of_replica(seed):
    """The seed of the replica that draws."""
    replica = rank_context.current().step.replica
    if replica is not None:
        # A tensor, in a function for all replicas.
        return tf.where(replica > 0, _with(replica, seed), seed)
    if tf.distribute.in_cross_replica_context():
        return seed
    context = tf.distribute.get_replica_context()
    replica = tf.get_static_value(context.replica_id_in_sync_group)
    return _with(replica, seed) if replica else seed


def _with(number, seed):
    return tf.random.experimental.stateless_fold_in(
        seed, tf.cast(number, seed.dtype)
    )
