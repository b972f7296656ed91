"""What `MeshStrategy` does: where variables live, how replicas are summed."""

import contextlib
import functools
import threading
import weakref

import keras
import tensorflow as tf

from tfscale.distribute import _tf_internals
from tfscale.distribute import zero
from tfscale.distribute.cross_device import SumOnEachDevice
from tfscale.distribute.late_variables import late_variable
from tfscale.distribute.late_variables import layers_around
from tfscale.distribute.optimizer import adapt_optimizer
from tfscale.distribute.parts import Parts
from tfscale.distribute.variable import MeshAccumulator
from tfscale.distribute.variable import MeshVariable
from tfscale.distribute.variable import ShardedVariable
from tfscale.tensor_parallel import analysis
from tfscale.tensor_parallel import collectives
from tfscale.tensor_parallel import layer_rules
from tfscale.tensor_parallel import sequence_model
from tfscale.tensor_parallel import sharded_call

_VARIABLE_CLASSES = {
    **_tf_internals.distribute_utils.VARIABLE_CLASS_MAPPING,
    tf.VariableSynchronization.ON_WRITE: MeshVariable,
    tf.VariableSynchronization.ON_READ: MeshAccumulator,
}


class _Replica(int):
    """The number of a replica, which knows which thread it is the number of.

    TensorFlow picks the components of values by thread; users are told the
    replica, which is the same for all of its model ranks.
    """

    thread: int


class MeshExtended(_tf_internals.MirroredExtended):
    """The `extended` of a `MeshStrategy`.

    As far as tf.distribute is concerned a replica is its first stage's
    device: it gets the inputs and runs what has no other place. Its model
    ranks are traced as if they were replicas, and hidden from users: all get
    the inputs of their replica, and what the first one returns is returned.

    Where a replica has several stages, variables are made on its host and
    `PipelineModel` moves them (`placed_on`), so that building a model never
    puts all of it on one accelerator.

    Args:
        strategy: The `MeshStrategy`.
        devices: Canonical device names,
            `devices[replica][pipeline_rank][model_rank]`.
        layouts: The `Layouts` that say which variables are sharded.
        zero_stage: 1 if replicas divide the slots of optimizers, else 0.
        sequence_parallel: Whether activations are divided along the sequence.
    """

    def __init__(
        self,
        strategy,
        devices,
        layouts,
        zero_stage=0,
        sequence_parallel=False,
    ):
        self.sequence_parallel = sequence_parallel
        self._sharded_calls = weakref.WeakSet()
        self._device_grid = devices
        self._layouts = layouts
        self._paths = []
        self._local = threading.local()
        self._functions = weakref.WeakKeyDictionary()
        self.num_model_ranks = len(devices[0][0])
        self.slot_parts = zero.SlotParts(
            len(devices) if zero_stage else 1, self.num_model_ranks
        )
        super().__init__(
            strategy,
            devices=[d for stages in devices for d in stages[0]],
            cross_device_ops=SumOnEachDevice(self.num_model_ranks),
        )
        host, threads = self._input_workers_devices[0]
        self._input_workers_devices = (
            (host, threads[:: self.num_model_ranks]),
        )

    def _input_workers_with_options(self, options=None):
        if options is None and self._is_on_cpu:
            # Nothing to fetch ahead to: batches are where they are used. Each
            # iterator more that is let go of may hold up `fit`, because
            # tf.data's autotuner may sleep through the end of it.
            options = tf.distribute.InputOptions(
                experimental_fetch_to_device=False
            )
        return super()._input_workers_with_options(options)

    def _experimental_distribute_dataset(self, dataset, options):
        if options or not self._takes_ordinary_iterator:
            return super()._experimental_distribute_dataset(dataset, options)
        return _tf_internals.get_distributed_dataset(
            dataset,
            self._input_workers_with_options(),
            self._container_strategy(),
            num_replicas_in_sync=1,
            options=_ordinary_iterator(),
        )

    def _distribute_datasets_from_function(self, dataset_fn, options):
        if options or not self._takes_ordinary_iterator:
            return super()._distribute_datasets_from_function(
                dataset_fn, options
            )
        return _tf_internals.get_distributed_datasets_from_function(
            dataset_fn,
            self._input_workers_with_options(),
            [tf.distribute.InputContext()],
            self._container_strategy(),
            options=_ordinary_iterator(),
        )

    @property
    def _takes_ordinary_iterator(self):
        return self._num_replicas_in_sync == 1 and self._is_on_cpu

    @property
    def _is_on_cpu(self):
        return all("CPU" in device for device in self._devices)

    @property
    def worker_devices(self):
        """One device of each replica, as far as inputs are concerned.

        A call has a thread for each model rank.
        """
        if getattr(self._local, "calls_ranks", False):
            return self._devices
        return self._devices[:: self.num_model_ranks]

    @property
    def _num_replicas_in_sync(self):
        return len(self._device_grid)

    def _get_replica_id_in_sync_group(self, replica_id):
        replica = _Replica(replica_id // self.num_model_ranks)
        replica.thread = replica_id
        return replica

    def _get_local_replica_id(self, replica_id_in_sync_group):
        return replica_id_in_sync_group.thread

    def _call_for_each_replica(self, fn, args, kwargs):
        self._layouts.check_all_matched(self._paths)
        if self.num_model_ranks == 1:
            return super()._call_for_each_replica(fn, args, kwargs)
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            return self._function_of_ranks(fn)(args, kwargs)
        return self._run_on_ranks(fn, args, kwargs)

    def _function_of_ranks(self, fn):
        """A function of all ranks; within one of each no two could meet."""
        if fn not in self._functions:
            run = functools.partial(self._run_on_ranks, fn.python_function)
            self._functions[fn] = tf.function(run)
        return self._functions[fn]

    def _run_on_ranks(self, fn, args, kwargs):
        args, kwargs = tf.nest.map_structure(self._to_ranks, (args, kwargs))
        if self.sequence_parallel:
            self._prepare_models(fn, args, kwargs)
        results = self._call_ranks(fn, args, kwargs)
        return tf.nest.map_structure(self._of_first_ranks, results)

    def _call_ranks(self, fn, args, kwargs):
        self._local.calls_ranks = True
        try:
            return super()._call_for_each_replica(_meeting(fn), args, kwargs)
        finally:
            self._local.calls_ranks = False

    def _prepare_models(self, fn, args, kwargs):
        """Finds the models that a function calls, and prepares them.

        Where activations are to be divided, a model has to be known before any
        of its layers runs: so there is a trial run, in a graph that is let go,
        which ends at the first layer that belongs to an unknown model.
        """
        while any(not call.is_decided for call in self._sharded_calls):
            with _tf_internals.FuncGraph("trial").as_default():
                try:
                    self._call_ranks(sequence_model.on_trial(fn), args, kwargs)
                except sequence_model.Prepared:
                    continue
                except Exception:
                    # What it is will be seen where it counts.
                    pass
            # No model has the others, or none that is called here.
            self._sharded_calls.clear()

    def _to_ranks(self, value):
        """Gives a replica's value to each of its ranks."""
        if not _is_per_replica(value, self._num_replicas_in_sync):
            return value
        return _tf_internals.distribute_utils.regroup(
            tuple(v for v in value.values for _ in range(self.num_model_ranks))
        )

    def _of_first_ranks(self, value):
        if not _is_per_replica(value, len(self._devices)):
            return value
        return _tf_internals.distribute_utils.regroup(
            value.values[:: self.num_model_ranks]
        )

    @property
    def gradients_are_reduced(self) -> bool:
        """Whether this thread runs inside `reduced_gradients`."""
        return getattr(self._local, "reduced", False)

    @contextlib.contextmanager
    def reduced_gradients(self):
        """Within it, `optimizer.apply` takes gradients summed over replicas.

        Keras sums gradients after it has clipped, unscaled and checked them,
        which is wrong with more than one replica: whoever owns the training
        step sums first (`sum_gradients`) and applies in here, in replica
        context. Every replica then does the same to its own components, with
        no merge call, so that `apply` may stand inside a `tf.cond`.
        """
        before = self.gradients_are_reduced
        self._local.reduced = True
        try:
            yield
        finally:
            self._local.reduced = before

    def sum_gradients(self, gradients, variables) -> list:
        """Gradients summed over the replicas; in replica context.

        Args:
            gradients: For each variable a tensor or None.
            variables: Trainable Keras variables.

        Returns:
            The sums; of those whose slots the replicas divide, this replica's
            part.
        """
        sums = list(gradients)
        if self._num_replicas_in_sync == 1:
            return sums
        dims = [self.slot_parts.dim_of(variable) for variable in variables]

        def sum_those(condition, add_up):
            places = [
                i
                for i, (gradient, dim) in enumerate(zip(gradients, dims))
                if gradient is not None and condition(dim)
            ]
            if places:
                found = add_up(
                    [tf.convert_to_tensor(sums[i]) for i in places],
                    [dims[i] for i in places],
                )
                for i, value in zip(places, found):
                    sums[i] = value

        context = tf.distribute.get_replica_context()
        sum_those(
            lambda dim: dim is None,
            lambda found, _: context.all_reduce(
                tf.distribute.ReduceOp.SUM, found
            ),
        )
        sum_those(lambda dim: dim is not None, zero.reduce_scatter)
        return sums

    def _replica_ctx_update(self, var, fn, args, kwargs, group):
        if not self.slot_parts.are_updated:
            return super()._replica_ctx_update(var, fn, args, kwargs, group)
        part = self.slot_parts.own_part(var)
        with tf.device(part.device):
            return fn(part, *args, **kwargs)

    @contextlib.contextmanager
    def placed_on(self, pipeline_rank: int, like=None):
        """Within it, variables are made on that stage's devices, everywhere.

        Args:
            pipeline_rank: Which stage's devices.
            like: The variable as which they are divided over model ranks,
                if they are.
        """
        self._local.like = like
        self._local.placement = [
            device
            for stages in self._device_grid
            for device in stages[pipeline_rank]
        ]
        try:
            yield
        finally:
            self._local.placement = self._local.like = None

    def _variable_devices(self, colocate_with):
        if colocate_with is not None:
            return colocate_with._devices
        placement = getattr(self._local, "placement", None)
        if placement:
            return placement
        if len(self._device_grid[0]) == 1:
            return self._devices
        return [
            _tf_internals.device_util.canonicalize("/device:CPU:0", device)
            for device in self._devices
        ]

    def _create_variable(self, next_creator, **kwargs):
        colocate_with = kwargs.pop("colocate_with", None)
        if not isinstance(
            colocate_with, (_tf_internals.DistributedVariable, type(None))
        ):
            # A single device: the state of a numpy dataset and the like.
            return super()._create_variable(
                next_creator, colocate_with=colocate_with, **kwargs
            )
        devices = self._variable_devices(colocate_with)
        callers = _tf_internals.name_scope_callers()
        parts, initial = None, kwargs["initial_value"]
        path = f"{_tf_internals.current_path()}/{kwargs['name']}"
        late = late_variable(initial)
        if late is not None and _is_layer(callers):
            path = late.path
            callers += layers_around(late, callers[-1])
        if self._layouts.size > 1 or (
            self.slot_parts.are_divided and _is_optimizer(callers)
        ):
            initial = _on_host(initial, kwargs.get("dtype"), devices[0])
            parts = self._parts(callers, path, initial, colocate_with, kwargs)

        def create_components(**kwargs):
            components = []
            for index, device in enumerate(devices):
                if index:
                    # The slash makes the name absolute.
                    kwargs["name"] = (
                        f"{components[0].name.split(':')[0]}/replica_{index}/"
                    )
                kwargs["initial_value"] = (
                    parts.split(initial)[index]
                    if parts
                    else (components[0].read_value if components else initial)
                )
                with tf.init_scope(), tf.device(device):
                    components.append(next_creator(**kwargs))
            return components

        classes = _VARIABLE_CLASSES
        if parts is not None:
            kwargs.pop("shape", None)
            sharded = functools.partial(ShardedVariable, parts=parts)
            classes = dict.fromkeys(classes, sharded)
        variable = _tf_internals.distribute_utils.create_mirrored_variable(
            self._container_strategy(),
            create_components,
            classes,
            _tf_internals.distribute_utils.VARIABLE_POLICY_MAPPING,
            **kwargs,
        )
        self._adapt(callers, variable)
        return variable

    def _parts(self, callers, path, initial, colocate_with, kwargs):
        """How a new variable is divided, or None if it is not."""
        rank_dim = replica_dim = None
        like = colocate_with
        if like is None:
            like = getattr(self._local, "like", None)
        if like is None:
            rank_dim = self._layout_dim(callers, path, initial, kwargs)
        elif initial.shape == getattr(like, "whole_shape", None):
            # Slots of an optimizer are divided like their variable, and more.
            rank_dim = getattr(like, "split_dim", None)
            if _is_optimizer(callers):
                replica_dim = self.slot_parts.dim_of(like)
        if rank_dim is None and replica_dim is None:
            return None
        return Parts(
            self._num_replicas_in_sync,
            self.num_model_ranks,
            rank_dim,
            replica_dim,
        )

    def _layout_dim(self, callers, path, initial, kwargs):
        """Along which dim model ranks divide a new variable of a layer."""
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            return None
        if not _is_layer(callers):
            return None
        self._paths.append(path)
        declared = _declared_dim(callers, kwargs["name"])
        return self._layouts.split_dim(path, tuple(initial.shape), declared)

    def _adapt(self, callers, variable):
        """Prepares a layer or optimizer for shards, when it makes variables."""
        if _is_optimizer(callers):
            adapt_optimizer(callers[-1], self)
        elif callers and isinstance(variable, ShardedVariable):
            decide = functools.partial(
                sequence_model.decide
                if self.sequence_parallel
                else analysis.decide,
                self.num_model_ranks,
            )
            for layer in layer_rules.concerned(callers):
                sharded_call.attach(layer, layer_rules.make_rule, decide)
                self._sharded_calls.add(layer._sharded_call)

    def _get_cross_device_ops(self, value):
        return self._cross_device_ops

    def _reduce_to(self, reduce_op, value, destinations, options):
        def reduce(value):
            if self.num_model_ranks > 1 and _is_per_replica(
                value, len(self._devices)
            ):
                return self._cross_device_ops.reduce_on_each(reduce_op, value)
            # Keras asks for the mean of a batch to learn what it looks like,
            # even if it has none: then the first replica's part has to do.
            if (
                reduce_op == tf.distribute.ReduceOp.MEAN
                and isinstance(value, tf.distribute.DistributedValues)
                and not _has_mean(self._local_results(value))
            ):
                return self._local_results(value)[0]
            return super(MeshExtended, self)._reduce_to(
                reduce_op, value, destinations, options
            )

        return tf.nest.map_structure(reduce, value)

    def _use_merge_call(self):
        return not self.gradients_are_reduced and super()._use_merge_call()

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        if self.gradients_are_reduced:
            return value
        return super()._replica_ctx_all_reduce(reduce_op, value, options)


def _ordinary_iterator():
    """Options with which one replica gets an ordinary iterator of tf.data.

    TensorFlow's for several devices has a `GeneratorDataset`, which makes glibc
    map memory anew for all of more than 128 KiB, for as long as the process
    lives (`ApplyPython311MemoryPatch`, TensorFlow 2.21). That costs what works
    on microbatches and shards a tenth of its time.
    """
    return tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=(
            tf.distribute.InputReplicationMode.PER_REPLICA
        ),
    )


def _is_layer(callers):
    """Whether it is a layer that makes a variable."""
    return bool(callers) and isinstance(callers[-1], keras.layers.Layer)


def _is_optimizer(callers):
    """Whether it is an optimizer that makes a variable."""
    return bool(callers) and isinstance(callers[-1], keras.optimizers.Optimizer)


def _declared_dim(callers, name):
    """What a layer says of its own or a sublayer's variable.

    `model_parallel_dims` of a layer has the divided dim of each variable by
    its path below the layer.
    """
    for depth, caller in enumerate(callers):
        dims = getattr(caller, "model_parallel_dims", None)
        if dims is not None:
            names = [layer.name for layer in callers[depth + 1 :]]
            return dims.get("/".join([*names, name]))
    return None


def _is_per_replica(value, count):
    return (
        isinstance(value, tf.distribute.DistributedValues)
        and not isinstance(value, _tf_internals.DistributedVariable)
        and len(value.values) == count
    )


def _meeting(fn):
    """The function, with its threads told where ranks meet: in its graph."""

    @functools.wraps(fn)
    def call(*args, **kwargs):
        with collectives.meeting_in(tf.compat.v1.get_default_graph()):
            return fn(*args, **kwargs)

    return call


def _on_host(initial_value, dtype, device):
    """The initial value, made on the host of a device."""
    host = _tf_internals.device_util.canonicalize("/device:CPU:0", device)
    with tf.init_scope(), tf.device(host):
        if callable(initial_value):
            initial_value = initial_value()
        return tf.convert_to_tensor(initial_value, dtype)


def _has_mean(tensors):
    first = tensors[0]
    return first.dtype not in (tf.bool, tf.string) and all(
        tensor.shape == first.shape for tensor in tensors
    )
