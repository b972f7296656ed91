"""Random numbers of replicas and ranks: which differ, and which are equal.

All devices have the same state of each `keras.random.SeedGenerator`. Each
replica but the first, whose seeds are those of one device, puts its number into
the seeds, because its rows are not another replica's. The ranks of a replica so
draw the same mask for an activation that is the same on all of them. Where a
draw is for a rank's shard of an activation, the rank goes into the seed too:

    state ─► seed of the replica ─► draw               replicated activation
    state ─► seed of the replica ─► fold in the rank ─► draw        sharded one

as with the two states of random generators in Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models (2022), and Megatron-LM's
`get_cuda_rng_tracker`. The state goes on as on one device in all cases.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.adapters.seed_generator import adapt_generator
from tfscale.collectives import rank_collectives
from tfscale.context import step_context
from tfscale.tensor_parallel.sequence_parallel import sequence


def generators(layer) -> list[keras.random.SeedGenerator]:
    """The seed generators of a layer and of all layers in it."""
    return [
        generator
        for sublayer in attributes.flatten_layers(layer)
        for generator in attributes.direct_generators(sublayer)
    ]


def attach(
    generator: keras.random.SeedGenerator,
    is_for_shard: Callable[[], bool] | None = None,
) -> None:
    """Makes seeds depend on the replica, and for shards on the rank.

    `is_for_shard` says whether a draw in the current model is for a shard.
    """
    options = {} if is_for_shard is None else {"is_for_shard": is_for_shard}
    adapt_generator(generator, seed_here=_seed_here, **options)


def _seed_here(generator, seed):
    if step_context.current().update is not None:
        return seed  # all replicas make the same update
    seed = _of_replica(seed)
    if rank_collectives.num_ranks() == 1:
        return seed
    plan = sequence.current()
    is_sharded = (
        step_context.current().ranks.seeds_are_for_shards
        or (plan is not None and id(generator.state) in plan.sharded_generators)
        or generator.is_for_shard()
    )
    return _with(rank_collectives.rank(), seed) if is_sharded else seed


class GlobalSeeds:
    """The global generator of replicas.

    Keras' global seed generator belongs to one thread, and each replica has a
    thread of its own. Several model ranks have none: their traces must equal
    one device's.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        extended = strategy.extended
        self._generator = None
        generator = attributes.used_seed_generator()
        if generator is not None and extended.num_model_ranks == 1:
            value = attributes.value_of(generator.state)
            is_distributed = isinstance(value, tf.distribute.DistributedValues)
            # All devices have the same state, or there is one device.
            if getattr(value, "distribute_strategy", None) is strategy or (
                extended.num_replicas == 1 and not is_distributed
            ):
                self._generator = generator
                attach(generator)

    def next(self, ordered: bool = True) -> Any:
        """See `keras.random.SeedGenerator`."""
        # A stage of a pipeline returns changed states, but not this one.
        if self._generator is not None and not attributes.is_stateless():
            return self._generator.next(ordered)
        callers = attributes.name_scope_callers()
        who = f"{callers[-1].name!r}" if callers else "a step"
        raise ValueError(
            "On a mesh, random numbers must be drawn from a seed generator "
            "that was created in the scope of the strategy. Received: a draw "
            f"of `keras.random` without a `seed`, by {who}. Create a "
            "`keras.random.SeedGenerator()` in the scope, as an attribute of "
            "the layer or of the model, and pass it as `seed`."
        )


def _of_replica(seed):
    replica = step_context.current().ranks.replica
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
