"""Phases that all model ranks of a replica run together.

A stage whose layers are split over ranks is traced for all of them in one
graph, in which the ranks meet. Each phase is then one function on the devices
of all ranks, for each replica; its tensors go by their rank, and their key
there:

    (0, Activation(v)) ──►┌─────────┐──► (0, Activation(w))
    (1, Activation(v)) ──►│ forward │──► (1, Activation(w))
                         └─────────┘

A stage that one device runs has rank 0 only.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence

import tensorflow as tf

from tfscale.distribute import MeshStrategy
from tfscale.pipeline.tracing import phases


def alone(phase: phases.Phase) -> phases.Phase:
    """A phase that one rank runs, with the rank in its keys."""
    return phases.Phase(
        phase.function,
        tuple((0, key) for key in phase.inputs),
        tuple((0, key) for key in phase.outputs),
    )


def trace(
    run_rank: Callable[[], None], strategy: MeshStrategy, devices: Sequence[str]
):
    """Runs a function on every rank of one replica, in one wrapped graph.

    It is called once for each rank, one after the other between the points
    where they meet, and outside of the strategy's replicas.
    """

    def run():
        with strategy.scope():
            strategy.extended.call_ranks(run_rank, devices)

    return tf.compat.v1.wrap_function(run, [])


def split(
    wrapped,
    arguments: Sequence[Mapping[Hashable, tf.Tensor]],
    parts: Sequence[Sequence[phases.PhaseSpec]],
    devices: Sequence[Sequence[str]],
) -> list[list[phases.Phase]]:
    """Splits what `trace` returned into phases, see `phases.split`.

    Args:
        wrapped: The result of `trace`.
        arguments: The placeholders of each rank, by key.
        parts: The phases of each rank.
        devices: `devices[replica][rank]`; traced with those of replica 0.

    Returns:
        The phases of each replica, with keys `(rank, key)`.
    """
    rank_of = {device: rank for rank, device in enumerate(devices[0])}
    joint_parts = [
        phases.PhaseSpec(
            of_ranks[0].name,
            {
                (rank, key): tensor
                for rank, part in enumerate(of_ranks)
                for key, tensor in part.results.items()
            },
            [op for part in of_ranks for op in part.side_effects],
            of_ranks[0].restart,
        )
        for of_ranks in zip(*parts)
    ]
    return [
        phases.split(
            wrapped,
            {
                (rank, key): tensor
                for rank, given in enumerate(arguments)
                for key, tensor in given.items()
            },
            joint_parts,
            devices=dict(zip(devices[0], names)),
            key_of_saved=lambda saved, x: (rank_of.get(x.device, 0), saved),
        )
        for names in devices
    ]
