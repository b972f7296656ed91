"""Phases that all model ranks of a replica run together.

A stage whose layers are split over ranks is traced for all of them in one
graph, in which the ranks meet. Each phase is one function on the devices of
all ranks; a rank's thread, as it writes its part of the schedule into the
step, hands in its arguments, and takes its results when all have done so.
"""

import concurrent.futures
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfscale.distribute import MeshStrategy
from tfscale.mesh import device_mesh
from tfscale.pipeline.tracing import phases
from tfscale.tensor_parallel import collectives


def trace(run_rank: Callable[[], None], devices: Sequence[str]):
    """Runs a function on every rank, in one graph.

    Args:
        run_rank: Called once for each rank, one after the other between the
            places where they meet.
        devices: Devices of the ranks.

    Returns:
        What `tf.compat.v1.wrap_function` returns.
    """
    mesh = device_mesh(model=len(devices), devices=list(devices))
    strategy = MeshStrategy(mesh, keras.distribution.LayoutMap(mesh))
    # In a thread of its own, because this one is in the scope of the strategy
    # that the model belongs to.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(
            tf.compat.v1.wrap_function, lambda: strategy.run(run_rank), []
        ).result()


def split(
    wrapped,
    arguments: Sequence[Mapping[Hashable, tf.Tensor]],
    parts: Sequence[Sequence[phases.Part]],
    devices: Sequence[Sequence[str]],
) -> list[list[phases.Phase]]:
    """Splits what `trace` returned into phases, see `phases.split`.

    Args:
        wrapped: What it returned.
        arguments: The placeholders of each rank, by key.
        parts: The phases of each rank.
        devices: `devices[replica][rank]`; traced with those of replica 0.

    Returns:
        The phases of each rank. Their functions are for replica context.
    """
    rank_of = {device: rank for rank, device in enumerate(devices[0])}
    joint_parts = [
        phases.Part(
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
    by_replica = [
        phases.split(
            wrapped,
            {
                (rank, key): tensor
                for rank, given in enumerate(arguments)
                for key, tensor in given.items()
            },
            joint_parts,
            devices=dict(zip(devices[0], names)),
            key_of_kept=lambda kept, x: (rank_of.get(x.device, 0), kept),
        )
        for names in devices
    ]
    joint = [_JointPhase(of_replicas) for of_replicas in zip(*by_replica)]
    return [
        [phase.of_rank(rank) for phase in joint] for rank in range(len(rank_of))
    ]


class _JointPhase:
    """A phase of all ranks.

    Args:
        by_replica: The same phase on the devices of each replica.
    """

    def __init__(self, by_replica):
        self._by_replica = by_replica
        self._arguments = {}
        self._results = {}

    def of_rank(self, rank):
        """What one rank sees of it: its own tensors."""
        phase = self._by_replica[0]
        return phases.Phase(
            self._meet,
            tuple(key for owner, key in phase.inputs if owner == rank),
            tuple(key for owner, key in phase.outputs if owner == rank),
        )

    def _meet(self, *arguments):
        context = tf.distribute.get_replica_context()
        replica = tf.get_static_value(context.replica_id_in_sync_group)
        me = int(replica), collectives.rank()
        self._arguments[me] = arguments
        context.merge_call(self._run)
        return self._results.pop(me)

    def _run(self, strategy):
        del strategy
        for replica, phase in enumerate(self._by_replica):
            given = {
                rank: iter(arguments)
                for (owner, rank), arguments in self._arguments.items()
                if owner == replica
            }
            *results, done = phase.function(
                *[next(given[rank]) for rank, _ in phase.inputs]
            )
            found = {rank: [] for rank in given}
            for (rank, _), result in zip(phase.outputs, results):
                found[rank].append(result)
            for rank, of_rank in found.items():
                self._results[replica, rank] = [*of_rank, done]
        self._arguments.clear()
