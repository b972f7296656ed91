"""Random numbers on ranks: alike for what is replicated, else each its own.

All ranks have the same state of each `keras.random.SeedGenerator`, and so
draw the same mask for an activation that is the same on all of them. Where a
draw is for a rank's part of a sharded activation, the rank goes into the seed:

    state ─► seed ─► draw                        replicated activation
    state ─► seed ─► fold in the rank ─► draw    sharded activation

as with the two states of random generators in Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models (2022), and Megatron-LM's
`get_cuda_rng_tracker`. The state goes on as on one device in both cases.
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
    is_for_shard: Callable[[], bool] = lambda: False,
) -> None:
    """Makes seeds depend on the rank where numbers are for its shard.

    Args:
        generator: The generator.
        is_for_shard: Says whether a draw is for a shard, in the model that is
            being called.
    """
    in_place.put(generator, RankedGenerator, is_for_shard=is_for_shard)


@contextlib.contextmanager
def of_shards():
    """Within it, attached generators draw for this rank's shard."""
    with rank_context.within(seeds_are_for_shards=True):
        yield


class RankedGenerator(in_place.Mixin):
    """A generator of a model on ranks, put in the place of Keras' class.

    Attributes:
        is_for_shard: See `attach`.
    """

    is_for_shard: Callable[[], bool]

    def next(self, ordered=True):
        """See `keras.random.SeedGenerator`; a seed for whole or part."""
        seed = super().next(ordered)
        if collectives.num_ranks() == 1:
            return seed
        plan = sequence.current()
        is_part = (
            rank_context.current().seeds_are_for_shards
            or (plan is not None and id(self.state) in plan.sharded_generators)
            or self.is_for_shard()
        )
        if not is_part:
            return seed
        return tf.random.experimental.stateless_fold_in(
            seed, tf.constant(collectives.rank(), seed.dtype)
        )
