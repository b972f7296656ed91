"""How the model ranks of a replica run: as replicas that nobody sees."""

import functools
import weakref

import tensorflow as tf

from tfscale import step_context
from tfscale._internals import attributes
from tfscale._internals import symbols
from tfscale.distribute.inputs.mesh_inputs import MeshInputs
from tfscale.distribute.mesh_config import MeshConfig
from tfscale.distribute.models.packed_logs import PackedLogs
from tfscale.distribute.reducer import Reducer
from tfscale.distribute.reducer import is_of_threads
from tfscale.tensor_parallel import rank_seeds
from tfscale.tensor_parallel import rank_state
from tfscale.tensor_parallel.sequence_parallel import sequence_model


class Replica(int):
    """The number of a replica, which knows which thread it is the number of.

    TensorFlow picks the components of values by thread; users are told the
    replica, which is the same for all of its model ranks.
    """

    thread: int


class ModelRanks(symbols.MirroredExtended):
    """The `extended` of a strategy whose replicas have model ranks.

    Ranks are traced as if they were replicas, a thread for each, and hidden
    from users: all get the inputs of their replica, and what the first one
    returns is returned.

    Attributes:
        num_replicas: Number of replicas of this worker.
        num_model_ranks: Number of model ranks of each replica.
        sequence_parallel: Whether activations are sharded along the sequence.
        num_gathers: How often replicas have gathered what all of them have.
        sharded_calls: Of the layers so far that have sharded variables.
        workers: The `Workers` that have replicas, or None for one process.
    """

    def __init__(self, strategy, config: MeshConfig):
        self.num_replicas = config.num_replicas
        self.num_gathers = 0
        self._functions: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.num_model_ranks = config.num_model_ranks
        self.sequence_parallel = config.sequence_parallel
        self.sharded_calls: weakref.WeakSet = weakref.WeakSet()
        self.workers = config.workers
        self._logs: PackedLogs | None = None
        self._devices = config.first_stage_devices
        self._reducer = Reducer(
            self.num_replicas, self.num_model_ranks, self.workers
        )
        super().__init__(
            strategy,
            # It wants devices of one machine, and sees no more of them.
            devices=self._devices[:1],
            cross_device_ops=self._reducer,
        )

    def _initialize_single_worker(self, devices):
        # As TensorFlow does, but for the line that it prints each time, and
        # for the host: where the program runs, wherever the devices are, since
        # that is where Python functions of a dataset are.
        del devices
        host = symbols.device_util.canonicalize("/device:CPU:0")
        self._input_workers_devices = ((host, self._first_ranks),)
        self._host_input_device = symbols.numpy_dataset.SingleDevice(host)
        spec = tf.DeviceSpec.from_string(host)
        if spec.job not in (None, "localhost"):
            # Where a scope makes what has no device of its own.
            self._default_device = (
                f"/job:{spec.job}/replica:{spec.replica}/task:{spec.task}"
            )
        self._inputs = MeshInputs(
            self._container_strategy(),
            host,
            self._devices,
            self._first_ranks,
            self.workers,
        )

    def _experimental_distribute_dataset(self, dataset, options):
        return self._inputs.of_dataset(dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn, options):
        return self._inputs.from_function(dataset_fn, options)

    @property
    def worker_devices(self):
        """One device of each replica, as far as inputs are concerned.

        A call has a thread for each model rank.
        """
        return rank_state.current().devices or self._first_ranks

    @property
    def _first_ranks(self):
        return self._devices[:: self.num_model_ranks]

    @property
    def _num_replicas_in_sync(self):
        step = step_context.current()
        if step.is_one_replica:
            return 1
        if step.part is not None:
            step.part.is_divided = True
        num_workers = 1 if self.workers is None else self.workers.count
        return self.num_replicas * num_workers

    def _get_replica_id_in_sync_group(self, replica_id):
        replicas_before = 0
        if self.workers is not None:
            replicas_before = self.workers.index * self.num_replicas
        replica = Replica(replicas_before + replica_id // self.num_model_ranks)
        replica.thread = replica_id
        return replica

    def _get_local_replica_id(self, replica_id_in_sync_group):
        return replica_id_in_sync_group.thread

    def replica_and_rank(self) -> tuple[int, int]:
        """Replica and model rank of this thread; in replica context."""
        thread = symbols.get_current_replica_id_as_int()
        if thread is None:
            raise ValueError(
                "A step must be called by the replicas. Received: a call in "
                "the scope of the strategy, outside of `strategy.run`. Call "
                "`strategy.run(model.train_step, args=(batch,))`, or likewise "
                "what has the step in it."
            )
        return divmod(thread, self.num_model_ranks)

    def _call_for_each_replica(self, fn, args, kwargs):
        if self.num_model_ranks == 1 and not self.gathers_weights:
            return super()._call_for_each_replica(
                self._with_seeds(fn), args, kwargs
            )
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            return self._function_of_ranks(fn)(args, kwargs)
        return self._run_on_ranks(fn, args, kwargs)

    @property
    def gathers_weights(self) -> bool:
        """Whether replicas meet where a weight is read."""
        return False

    def _function_of_ranks(self, fn):
        """A function of all ranks; within one of each no two could meet."""
        if fn not in self._functions:
            run = functools.partial(self._run_on_ranks, fn.python_function)
            self._functions[fn] = tf.function(run)
        return self._functions[fn]

    def _run_on_ranks(self, fn, args, kwargs):
        args, kwargs = tf.nest.map_structure(self._to_ranks, (args, kwargs))
        if self.sequence_parallel:
            sequence_model.prepare_called(
                fn,
                lambda fn: self.call_ranks(fn, self._devices, args, kwargs),
                self.sharded_calls,
            )
        results = self.call_ranks(fn, self._devices, args, kwargs)
        return tf.nest.map_structure(self._of_first_ranks, results)

    def call_ranks(self, fn, devices, args=(), kwargs=None):
        """Calls a function on model ranks, a thread for each device."""
        with rank_state.within(devices=tuple(devices)):
            return super()._call_for_each_replica(
                self._with_seeds(_with_collectives(fn)), args, kwargs or {}
            )

    def _with_seeds(self, fn):
        """The function, for threads without a global seed generator."""
        # A function of TensorFlow is called as it is; and outside of functions
        # each draw may have a generator of its own.
        if tf.executing_eagerly() or isinstance(
            fn, tf.types.experimental.PolymorphicFunction
        ):
            return fn
        seeds = rank_seeds.GlobalSeeds(
            self._container_strategy(), self.num_replicas, self.num_model_ranks
        )

        @functools.wraps(fn)
        def call(*args, **kwargs):
            with attributes.global_seeds(seeds):
                return fn(*args, **kwargs)

        return call

    def _to_ranks(self, value):
        """Gives a replica's value to each of its ranks."""
        if not _is_per_replica(value, self.num_replicas):
            return value
        return symbols.distribute_utils.regroup(
            tuple(v for v in value.values for _ in range(self.num_model_ranks))
        )

    def _of_first_ranks(self, value):
        if not _is_per_replica(value, len(self._devices)):
            return value
        return symbols.distribute_utils.regroup(
            value.values[:: self.num_model_ranks]
        )

    def _in_multi_worker_mode(self):
        return self.workers is not None

    def _get_cross_device_ops(self, value):
        return self._reducer

    def _reduce_to(self, reduce_op, value, destinations, options):
        has_all = _is_per_replica(value, len(self._devices))
        if self.workers is None and self.num_model_ranks > 1 and has_all:
            return self._reducer.on_each(reduce_op, [value])[0]

        def reduce(value):
            is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
            is_mirrored = isinstance(value, symbols.Mirrored)
            if self.workers is not None:
                if is_mean and is_mirrored:
                    return value.values[0]
                mean = self._logged_mean(value) if is_mean else None
                if mean is not None:
                    return mean
            elif not is_of_threads(value) or (is_mirrored and not is_mean):
                return super(ModelRanks, self)._reduce_to(
                    reduce_op, value, destinations, options
                )
            return self._reducer.on_destinations(
                reduce_op, self._parts_of(value), value, destinations
            )

        return tf.nest.map_structure(reduce, value)

    def _logged_mean(self, value):
        """The mean of a number that a step has logged, or None."""
        return None if self._logs is None else self._logs.take(value)

    def _parts_of(self, value):
        """What each replica of this worker has of a value."""
        if self.workers is None:
            return self._local_results(value)
        value = tf.nest.map_structure(self._of_first_ranks, value)
        if isinstance(value, symbols.Mirrored):
            value = value.values[0]
        if is_of_threads(value):
            return [tf.convert_to_tensor(x) for x in value.values]
        return [tf.convert_to_tensor(value)] * self.num_replicas

    def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
        # A tensor that threads share comes as itself, for all replicas.
        values = [value for value, _ in value_destination_pairs]
        return self._reducer.on_each(reduce_op, values)

    def _batch_gather_to(self, value_destination_pairs, axis, options=None):
        # What `all_gather` calls, where all threads meet.
        self.num_gathers += 1
        return [
            self._reducer.gathered(self._parts_of(value), axis)
            if self.workers is not None
            else tf.concat([value] * self.num_replicas, axis)
            if not is_of_threads(value)
            else self._gather_to(value, destination, axis, options)
            for value, destination in value_destination_pairs
        ]

    def _gather_to_implementation(self, value, destinations, axis, options):
        if self.workers is not None:
            # Keras gathers one tensor of each worker, with its replicas' sizes.
            parts = self._parts_of(value) if is_of_threads(value) else [value]
            return self._reducer.gathered(parts, axis)
        if _is_per_replica(value, len(self._devices)):
            return self._reducer.gather_on_each(value, axis)
        return super()._gather_to_implementation(
            value, destinations, axis, options
        )

    def _local_results(self, value):
        # Where threads meet there is a value of each rank.
        value = tf.nest.map_structure(self._of_first_ranks, value)
        with rank_state.within(devices=None):
            return super()._local_results(value)


def _is_per_replica(value, count):
    return (
        isinstance(value, tf.distribute.DistributedValues)
        and not isinstance(value, symbols.DistributedVariable)
        and len(value.values) == count
    )


def _with_collectives(fn):
    """The function, with its threads told where ranks meet: in its graph."""

    @functools.wraps(fn)
    def call(*args, **kwargs):
        with rank_state.within(graph=tf.compat.v1.get_default_graph()):
            return fn(*args, **kwargs)

    return call
