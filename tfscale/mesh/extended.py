"""The work of `MeshStrategy`: it creates variables, sums gradients, updates."""

import contextlib
import functools
import weakref
from typing import Any

import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import datasets
from tfscale._internals import symbols
from tfscale.adapters.compiled_model import predicting_in_clusters
from tfscale.adapters.model import adapt_model
from tfscale.adapters.shared_model import SharedModel
from tfscale.adapters.shared_model import can_share
from tfscale.collectives import device_names
from tfscale.collectives import operations
from tfscale.collectives.reducer import Reducer
from tfscale.collectives.reducer import is_of_threads
from tfscale.collectives.reducer import is_per_replica
from tfscale.collectives.reducer import of_first_ranks
from tfscale.collectives.workers import check_one_process
from tfscale.context import step_context
from tfscale.graphs import function_options
from tfscale.graphs import xla_clusters
from tfscale.mesh.first_step import tell_if_long
from tfscale.mesh.inputs.mesh_inputs import MeshInputs
from tfscale.mesh.mesh_config import MeshConfig
from tfscale.mesh.rank_calls import RankCalls
from tfscale.mesh.replica_checks import check
from tfscale.mesh.replica_checks import check_in_scope
from tfscale.mesh.replica_checks import prepare
from tfscale.mesh.shared_call import SharedCall
from tfscale.mesh.update import mixed_update
from tfscale.mesh.update.shared_updates import SharedUpdates
from tfscale.mesh.variable_creator import VariableCreator
from tfscale.step import shard_errors
from tfscale.step import whole
from tfscale.step.packed_logs import PackedLogs
from tfscale.variables import zero


class MeshExtended(symbols.MirroredExtended):
    """The `extended` of a `MeshStrategy`.

    For `tf.distribute` a replica is the devices of its first stage: they get
    the inputs and run all operations without another device.

    Attributes:
        inputs: The `MeshInputs`, which distributes datasets.
        pipelined: The variables of models that were cut over the axis
            "pipeline", by `id(variable)`.
        traced_models: The models whose steps replicas have run.
        gradient_noise: The argument of `measure_gradients`, or None.
    """

    def __init__(self, strategy, config: MeshConfig):
        self._strategy = weakref.ref(strategy)
        self.config = config
        self.layouts = config.layouts
        self.num_replicas = config.num_replicas
        self.num_model_ranks = config.num_model_ranks
        self.sequence_parallel = config.sequence_parallel
        self.workers = config.workers
        self.pipelined: weakref.WeakValueDictionary = (
            weakref.WeakValueDictionary()
        )
        self.traced_models: weakref.WeakSet = weakref.WeakSet()
        self.gradient_noise: Any = None
        self.optimizer_states = zero.OptimizerStateSharding(
            config.zero_stage,
            config.num_replicas,
            config.num_model_ranks,
            config.offloads_slots,
        )
        self.variable_creator = VariableCreator(
            config.devices, config.layouts, self.optimizer_states
        )
        self.rank_calls = RankCalls(config)
        self._logs: PackedLogs | None = None
        self._devices = config.first_stage_devices
        self.reducer = Reducer(
            self.num_replicas, self.num_model_ranks, self.workers
        )
        super().__init__(
            strategy,
            # The constructor accepts devices of one machine only.
            devices=self._devices[:1],
            cross_device_ops=self.reducer,
        )

    def _initialize_single_worker(self, devices):
        # As TensorFlow does, without its printed line. The host is the one of
        # the program, where Python functions of a dataset run.
        del devices
        host = device_names.full_name("/device:CPU:0")
        self.inputs = MeshInputs(
            self._strategy(),
            host,
            self._devices,
            self._first_ranks,
            self.config,
        )

    @property
    def worker_devices(self):
        """One device of each replica, for inputs.

        In a call there is one for each model rank.
        """
        return step_context.current().ranks.devices or self._first_ranks

    @property
    def _first_ranks(self):
        return self._devices[:: self.num_model_ranks]

    @property
    def _num_replicas_in_sync(self):
        one = step_context.current().sees_one_device
        return 1 if one else self.num_all_replicas

    @property
    def num_all_replicas(self) -> int:
        """Number of replicas of all workers, also in a step of a model."""
        num_workers = 1 if self.workers is None else self.workers.count
        return self.num_replicas * num_workers

    # TensorFlow picks components of values by thread, and each model rank has
    # its own; users are told the replica, see `RankContext`.

    def _get_replica_id_in_sync_group(self, replica_id):
        index = 0 if self.workers is None else self.workers.index
        return index * len(self._devices) + replica_id

    def _get_local_replica_id(self, replica_id_in_sync_group):
        return replica_id_in_sync_group % len(self._devices)

    def replica_and_rank(self) -> tuple[int, int]:
        """Replica and model rank of this thread; in replica context."""
        thread = symbols.get_current_replica_id_as_int()
        if thread is None:
            raise ValueError(
                "A step must be called in replica context. Received: a call "
                "in the scope of the strategy, outside of `strategy.run`. "
                "Call `strategy.run(model.train_step, args=(batch,))`, or run "
                "the surrounding function so."
            )
        return divmod(thread, self.num_model_ranks)

    @property
    def is_of_several_devices(self) -> bool:
        """Whether a step runs on devices that one function of XLA cannot."""
        return (
            len(self._devices) > 1
            or self.workers is not None
            or self.optimizer_states.are_on_host
        )

    @property
    def ranks_share_function(self) -> bool:
        """Whether devices exchange values within a step; else each has one."""
        return (
            self.num_model_ranks > 1
            or self.gathers_weights
            or self.optimizer_states.are_on_host
        )

    @property
    def has_several_replicas(self) -> bool:
        """Whether gradients are added up, here or over workers."""
        # `num_replicas_in_sync` is 1 in a step of a model.
        return self.num_replicas > 1 or self.workers is not None

    def _create_variable(self, next_creator, **kwargs):
        colocate_with = kwargs.get("colocate_with")
        if not (colocate_with is None or is_of_threads(colocate_with)):
            # A single device: the state of a numpy dataset and the like.
            return super()._create_variable(next_creator, **kwargs)
        return self.variable_creator.create(
            self._strategy(), next_creator, **kwargs
        )

    def call_for_each_replica(self, fn, args=(), kwargs=None):
        """See `tf.compat.v1.distribute.StrategyExtended`."""
        check(self, fn)
        if self.ranks_share_function and attributes.asks_for_xla(fn):
            fn = predicting_in_clusters(fn)
        model = whole.model_of(fn)
        traced = model or attributes.predicting_model(fn)
        if traced is not None:
            self.traced_models.add(traced)
            if model is not None and (
                self.workers is None or self.workers.index == 0
            ):
                tell_if_long(model, self._strategy().mesh)
        logs_are_packed = self.workers is not None and model is not None
        if logs_are_packed:
            adapt_model(model)
        outside: Any = contextlib.nullcontext
        if function_options.have_clusters():
            outside = xla_clusters.with_exceptions
        with outside():
            results = self._call(fn, args, kwargs or {})
        if logs_are_packed:
            self._logs = PackedLogs(
                results, self._local_values, self.reducer.means
            )
        return results

    def _call(self, fn, args, kwargs):
        # Iterators in a graph have no None.
        args, kwargs = datasets.with_none((args, kwargs))
        is_divided = any(map(is_of_threads, tf.nest.flatten((args, kwargs))))
        if not is_divided and attributes.predicting_model(fn) is not None:
            check_one_process(
                self._strategy(),
                "`predict_on_batch`, whose rows belong to no known replica,",
                "Call `model.predict(x, batch_size=len(x))` in all workers.",
            )
            # `predict_on_batch`: all replicas have the same results, and Keras
            # would return each of them.
            results = self._call_on_ranks(fn, args, kwargs)
            return tf.nest.map_structure(
                lambda value: self._results_here(value)[0], results
            )
        # A `tf.function` has a separate graph in each replica, in which
        # replicas cannot exchange values.
        if not isinstance(fn, tf.types.experimental.PolymorphicFunction):
            explained = shard_errors.explained(whole.model_of(fn))
            fn = explained(whole.with_input_dependencies(fn))
            if self._num_replicas_in_sync > 1:
                prepare(fn)
                fn = whole.prepared(fn, is_divided)
        return self._call_on_ranks(fn, args, kwargs)

    def _call_on_ranks(self, fn, args, kwargs):
        if self.num_model_ranks > 1 or self.gathers_weights:
            return self.rank_calls.run(self.call_ranks, fn, args, kwargs)
        return self.call_ranks(fn, self._devices, args, kwargs)

    def call_ranks(self, fn, devices, args=(), kwargs=None):
        """Calls a function on model ranks, a thread for each device."""
        fn = whole.on_thread(fn, self._strategy(), self._shared(fn))
        with step_context.within_ranks(devices=tuple(devices)):
            return super().call_for_each_replica(fn, args, kwargs)

    def _shared(self, fn):
        """Nothing where XLA may compile the step, or replicas divide slots."""
        if (
            not self.is_of_several_devices
            or function_options.have_clusters()
            or self.optimizer_states.are_sharded
        ):
            return step_context.Shared()
        model = whole.model_of(fn)
        has_call = (
            not tf.executing_eagerly()
            and getattr(fn, "__name__", "") == "train_step"
            and isinstance(model, SharedModel)
            and can_share(self, model)
        )
        return step_context.Shared(
            SharedUpdates(), SharedCall(model) if has_call else None
        )

    def measure_gradients(self, noise: Any) -> None:
        """Has a `GradientNoise` see gradients before and after they are summed.

        None ends it.
        """
        self.gradient_noise = noise

    @property
    def gathers_weights(self) -> bool:
        """Whether replicas gather a weight where it is read."""
        return self.optimizer_states.are_weights_sharded

    @property
    def accumulates_shards(self) -> bool:
        """Whether sums of microbatches' gradients are sharded over replicas."""
        states = self.optimizer_states
        return states.stage >= 2 and states.are_sharded

    @property
    def gradients_are_summed(self) -> bool:
        """Whether an optimizer applies sums over the replicas in this thread.

        Every replica then updates its own components without a merge call, so
        that `apply` may be inside a `tf.cond`.
        """
        return step_context.current().update is not None

    def update(self, var, fn, args=(), kwargs=None, group=True):
        """See `tf.distribute.StrategyExtended`."""
        states, kwargs = self.optimizer_states, kwargs or {}
        in_default_context = not tf.distribute.has_strategy()
        if in_default_context or tf.distribute.in_cross_replica_context():
            check_in_scope(var)
            return mixed_update.update_local_shards(
                super().update, states, var, fn, args, kwargs, group
            )
        if not states.reads_local_shards:
            return super().update(var, fn, args, kwargs, group)
        shard = states.local_shard(var)
        with tf.device(shard.device):
            return fn(shard, *args, **kwargs)

    def _use_merge_call(self):
        return not self.gradients_are_summed and super()._use_merge_call()

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        if self.gradients_are_summed:
            return value
        return super()._replica_ctx_all_reduce(reduce_op, value, options)

    def _in_multi_worker_mode(self):
        return self.workers is not None

    def reduce_to(self, reduce_op, value, destinations, options=None):
        """See `tf.distribute.StrategyExtended`."""
        reduce_op = self._checked(reduce_op, destinations)
        has_all = is_per_replica(value, len(self._devices))
        if self.workers is None and self.num_model_ranks > 1 and has_all:
            return self.reducer.on_each(reduce_op, [value])[0]

        def reduce(value):
            if value is None:
                return None
            is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
            is_mirrored = isinstance(value, symbols.Mirrored)
            if self.workers is not None:
                if is_mean and is_mirrored:
                    return value.values[0]
                if is_mean and self._logs is not None:
                    mean = self._logs.take(value)
                    if mean is not None:
                        return mean
            elif not is_of_threads(value) or (is_mirrored and not is_mean):
                return super(MeshExtended, self).reduce_to(
                    reduce_op, value, destinations, options
                )
            return self.reducer.on_destinations(
                reduce_op, self._local_values(value), value, destinations
            )

        return tf.nest.map_structure(reduce, value)

    def _local_values(self, value):
        """The tensors of a value, one for each replica of this worker."""
        if self.workers is None:
            return self._results_here(value)
        value = tf.nest.map_structure(self.of_first_ranks, value)
        if isinstance(value, symbols.Mirrored):
            value = value.values[0]
        if is_of_threads(value):
            return [_as_tensor(x) for x in value.values]
        return [_as_tensor(value)] * self.num_replicas

    def reduce_all(self, reduce_op, _, *values):
        """Reduces the values of all replicas; called through `merge_call`."""
        return self.batch_reduce_to(reduce_op, [(x, x) for x in values])

    def batch_reduce_to(self, reduce_op, value_destination_pairs, options=None):
        """See `tf.distribute.StrategyExtended`."""
        # A tensor that threads share is one tensor for all replicas.
        values = [value for value, _ in value_destination_pairs]
        return self.reducer.on_each(self._checked(reduce_op), values)

    def _checked(self, reduce_op, destinations=""):
        """The operation, after TensorFlow's checks of arguments and context."""
        super().reduce_to(reduce_op, [], destinations)
        if isinstance(reduce_op, str):
            return tf.distribute.ReduceOp(reduce_op.upper())
        return reduce_op

    def _gather_to_implementation(self, value, destinations, axis, options):
        if self.workers is not None:
            # Keras gathers one tensor of each worker, with its replicas' sizes.
            values = (
                self._local_values(value) if is_of_threads(value) else [value]
            )
            return self.reducer.gathered(values, axis)
        if is_per_replica(value, len(self._devices)):
            gather = functools.partial(operations.all_gather, dim=axis)
            return self.reducer.of_groups(gather, value)
        return super()._gather_to_implementation(
            value, destinations, axis, options
        )

    def _results_here(self, value):
        return self._strategy().experimental_local_results(value)

    def of_first_ranks(self, value: Any) -> Any:
        """The first ranks' components of a value of all ranks."""
        return of_first_ranks(value, len(self._devices), self.num_model_ranks)


def _as_tensor(value):
    if isinstance(value, tf.SparseTensor | tf.RaggedTensor):
        return value
    return tf.convert_to_tensor(value)
