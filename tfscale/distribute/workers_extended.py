"""A mesh whose data axis goes on over worker processes.

Each worker runs the same program, has whole rows of the mesh, and does with
them what a `MeshStrategy` of one process does. Whatever is a sum over replicas
there is here one over the replicas of this worker, and then over the workers:

    worker 0   replica 0 ─┐                      ┌─► replica 0
                          ├─ sum ─┐      ┌─ copy ┤
               replica 1 ─┘       │      │       └─► replica 1
                                  ├─ sum ┤
    worker 1   replica 2 ─┐       │      │       ┌─► replica 2
                          ├─ sum ─┘      └─ copy ┤
               replica 3 ─┘                      └─► replica 3

The numbers of replicas that users are told, and Keras, are those of all
workers; which thread, device or component it is, is counted in this one.
"""

import tensorflow as tf

from tfscale import _internals
from tfscale import in_place
from tfscale import rank_context
from tfscale.collectives import operations
from tfscale.collectives.workers import Workers
from tfscale.distribute import cross_device
from tfscale.distribute import one_process
from tfscale.distribute.cross_device import SumOverWorkers
from tfscale.distribute.extended import MeshExtended
from tfscale.distribute.model_ranks import Replica
from tfscale.distribute.models import saving
from tfscale.distribute.models.packed_logs import PackedLogs
from tfscale.distribute.replica_function import are_per_replica
from tfscale.whole_batch import step as whole_batch_step


class WorkersExtended(MeshExtended):
    """The `extended` of a `MeshStrategy` over several workers.

    Args:
        workers: The workers.
        strategy: See `MeshExtended`.
        devices: Those of this worker, see there.
        layouts: See there.
        zero_stage: See there; slots are divided over this worker's replicas.
        sequence_parallel: See there.
    """

    has_workers = True
    workers: Workers

    def __init__(
        self,
        workers: Workers,
        strategy,
        devices,
        layouts,
        zero_stage,
        sequence_parallel,
    ):
        self.workers = workers
        super().__init__(
            strategy, devices, layouts, zero_stage, sequence_parallel
        )
        self._cross_device_ops = SumOverWorkers(self.num_model_ranks, workers)
        self._logs: PackedLogs | None = None

    @property
    def _num_replicas_in_sync(self):
        here = super()._num_replicas_in_sync
        if rank_context.current().step.is_one_replica:
            return here
        return here * self.workers.count

    def _get_replica_id_in_sync_group(self, replica_id):
        replica = Replica(
            self.workers.index * self.num_replicas
            + replica_id // self.num_model_ranks
        )
        replica.thread = replica_id
        return replica

    def _in_multi_worker_mode(self):
        return True

    def _call_for_each_replica(self, fn, args, kwargs):
        if _internals.predicts(fn) and not are_per_replica(args):
            one_process.check(
                self._container_strategy(),
                "`predict_on_batch`, of which nobody knows whose rows it has,",
                "Call `model.predict(x, batch_size=len(x))` in all workers.",
            )
        model = whole_batch_step.model_of(fn)
        if model is not None:
            in_place.put(model, saving.SavedByOneWorker)
        results = super()._call_for_each_replica(fn, args, kwargs)
        if model is not None:
            self._logs = PackedLogs(results, self._of_replicas, self._means)
        return results

    # --- values of all replicas ----------------------------------------

    def sum_over_workers(self, tensors):
        """See `MeshExtended`."""
        return self.workers.all_reduce(tensors)

    def from_first_worker(self, tensor, path):
        """See `MeshExtended`."""
        fact = f"{path} {tensor.shape} {tensor.dtype.name}"
        self.workers.coordination.check_same("variables", fact)
        return self.workers.from_first(tensor)

    def _of_replicas(self, value):
        """What the replicas of this worker have of a value, a list."""
        value = tf.nest.map_structure(self._of_first_ranks, value)
        if isinstance(value, _internals.Mirrored):
            value = value.values[0]
        if isinstance(value, tf.distribute.DistributedValues):
            return [tf.convert_to_tensor(x) for x in value.values]
        return [tf.convert_to_tensor(value)] * self.num_replicas

    def _reduce_to(self, reduce_op, value, destinations, options):
        def reduce(value):
            is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
            if is_mean and isinstance(value, _internals.Mirrored):
                return value.values[0]
            if is_mean and self._logs is not None:
                mean = self._logs.take(value)
                if mean is not None:
                    return mean
            parts = self._of_replicas(value)
            if (
                is_mean
                and tf.executing_eagerly()
                and not self._have_mean(parts)
            ):
                return cross_device.part_with_rows(parts)
            if is_mean:
                return self._means([parts])[0]
            with tf.device(parts[0].device):
                total = operations.reduce(parts)
                return self.workers.all_reduce([total])[0]

        return tf.nest.map_structure(reduce, value)

    def _means(self, values):
        """Means over all replicas, of which some parts are here."""
        sums = []
        for parts in values:
            with tf.device(parts[0].device):
                sums.append(operations.reduce(parts))
        count = self.num_replicas * self.workers.count
        means = []
        for total in self.workers.all_reduce(sums):
            with tf.device(total.device):
                means.append(total / tf.cast(count, total.dtype))
        return means

    def _have_mean(self, parts):
        """Whether tensors of all replicas have one; see `have_mean`."""
        if parts[0].dtype in (tf.bool, tf.string):
            return False
        if not parts[0].shape.rank:
            return True
        shapes = tf.constant([part.shape.as_list() for part in parts])
        shapes = self.workers.all_gather(shapes)
        return bool(tf.reduce_all(shapes == shapes[:1]))

    def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
        values = [value for value, _ in value_destination_pairs]
        return self._cross_device_ops.reduce_all(
            reduce_op, values, self.num_replicas
        )

    def _gather_to_implementation(self, value, destinations, axis, options):
        # Keras gathers one tensor of each worker, with its replicas' sizes.
        is_of_replicas = isinstance(value, tf.distribute.DistributedValues)
        return self._gathered(value if is_of_replicas else [value], axis)

    def _batch_gather_to(self, value_destination_pairs, axis, options=None):
        self.num_gathers += 1
        return [
            self._gathered(value, axis) for value, _ in value_destination_pairs
        ]

    def _gathered(self, value, axis):
        parts = value if isinstance(value, list) else self._of_replicas(value)
        with tf.device(tf.convert_to_tensor(parts[0]).device):
            here = tf.concat(parts, axis)
            return self.workers.all_gather(here, axis)
