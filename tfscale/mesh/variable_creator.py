"""Creates a strategy's variables: on which devices, and which shard on each."""

import contextlib
import functools
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import symbols
from tfscale.adapters.layer import adapt_layer
from tfscale.adapters.optimizer import adapt_optimizer
from tfscale.collectives.device_names import host_of
from tfscale.mesh.update.mesh_update import MeshUpdate
from tfscale.tensor_parallel import rank_seeds
from tfscale.tensor_parallel.layouts.layouts import Layouts
from tfscale.tensor_parallel.rules import sharded_call
from tfscale.tensor_parallel.sequence_parallel import sequence_model
from tfscale.variables.of_variable import sharding_of
from tfscale.variables.of_variable import state_sharding_of
from tfscale.variables.sharded_variable import ShardedVariable
from tfscale.variables.sharding import Sharding
from tfscale.variables.shards import shards
from tfscale.variables.variable import MeshAccumulator
from tfscale.variables.variable import MeshVariable
from tfscale.variables.zero import OptimizerStateSharding


class VariableCreator:
    """Creates the variables of a strategy's scope.

    The creator of a variable decides its sharding: a layer's is sharded by the
    layout map, an optimizer's slot like its variable and, with `zero_stage=1`,
    over the replicas too, any other not at all. Layers and optimizers are
    prepared for shards when they create their first one.

    With several stages, variables are created on the replica's host and
    `PipelineModel` moves them (`placed_on`), so that a model is never built on
    one accelerator.

    Attributes:
        paths: Paths of the layers' variables so far.
    """

    def __init__(
        self,
        devices,
        layouts: Layouts,
        optimizer_states: OptimizerStateSharding,
    ):
        self._device_grid = devices
        self._layouts = layouts
        self._optimizer_states = optimizer_states
        self.paths = []
        self._pipeline_rank: int | None = None
        self._made_like: Any = None

    @contextlib.contextmanager
    def placed_on(self, pipeline_rank: int, like=None):
        """Within it, variables are on a stage's devices, sharded as `like`."""
        before = self._pipeline_rank, self._made_like
        self._pipeline_rank, self._made_like = pipeline_rank, like
        try:
            yield
        finally:
            self._pipeline_rank, self._made_like = before

    def create(self, strategy, next_creator, *, colocate_with=None, **kwargs):
        """Creates a variable, on the devices of `colocate_with` if given."""
        synchronization = kwargs.get("synchronization")
        if synchronization == tf.VariableSynchronization.NONE:
            raise ValueError(
                "A variable in the scope of a strategy must be the same on all "
                "devices, or be summed when it is read. Received: the variable "
                f"{kwargs.get('name')!r} with `synchronization` NONE. Leave "
                "the argument out, or pass ON_READ and an `aggregation`."
            )
        devices = self._devices(colocate_with)
        callers, path = _callers_and_path(**kwargs)
        caller, states = callers[-1], self._optimizer_states
        is_state = isinstance(caller, keras.optimizers.Optimizer)
        is_of_layer = isinstance(caller, keras.layers.Layer)
        # Of what `fit` builds no layer is known; it trains nothing else late.
        is_late = caller is None and _late_variable(**kwargs) is not None
        is_weight = (is_of_layer or is_late) and kwargs.get("trainable")
        if states.are_on_host and is_state:
            devices = [host_of(device) for device in devices]
        if is_of_layer:
            self.paths.append(path)
        sharding = values = None
        workers = strategy.extended.workers
        if self._made_like is not None:
            workers = None
        if (
            workers is not None
            or self._layouts.size > 1
            or (states.are_sharded and is_state)
            or (states.are_weights_sharded and is_weight)
        ):
            with tf.init_scope(), tf.device(host_of(devices[0])):
                initial = kwargs["initial_value"]
                if callable(initial):
                    initial = initial()
                initial = tf.convert_to_tensor(initial, kwargs.get("dtype"))
                if workers is not None:
                    fact = f"{path} {initial.shape} {initial.dtype.name}"
                    workers.coordination.check_same("variables", fact)
                    initial = workers.from_first(initial)
                sharding = self._sharding(
                    callers, path, initial, colocate_with, is_weight, kwargs
                )
                if sharding.is_sharded:
                    values = shards(initial, sharding)
            kwargs["initial_value"] = initial

        # As `MeshAccumulator.assign` divides a sum over its components.
        is_read = synchronization == tf.VariableSynchronization.ON_READ
        aggregation = kwargs.get("aggregation", tf.VariableAggregation.NONE)
        is_sum = is_read and aggregation == tf.VariableAggregation.SUM
        num_whole = strategy.extended.num_model_ranks
        if workers is not None and workers.index:
            num_whole = 0

        def create_components(**kwargs):
            components = []
            for index, device in enumerate(devices):
                if index:
                    # The slash makes the name absolute.
                    kwargs["name"] = (
                        f"{components[0].name.split(':')[0]}/replica_{index}/"
                    )
                    kwargs["initial_value"] = components[0].read_value
                if is_sum and index >= num_whole:
                    whole = kwargs["initial_value"]
                    kwargs["initial_value"] = _zeros_like(whole)
                if values:
                    kwargs["initial_value"] = values[index]
                with tf.init_scope(), tf.device(device):
                    components.append(next_creator(**kwargs))
            return components

        kind: Any = MeshAccumulator if is_read else MeshVariable
        if values:
            kwargs.pop("shape", None)
            like = self._made_like
            kind = functools.partial(
                ShardedVariable,
                sharding=sharding,
                path=path if like is None else like.path,
                is_state=is_state,
            )
        variable = kind(strategy, create_components(**kwargs), aggregation)
        if isinstance(caller, keras.layers.BatchNormalization):
            adapt_layer(caller)
        if isinstance(caller, keras.random.SeedGenerator):
            rank_seeds.attach(caller)
        if is_state:
            update = MeshUpdate(strategy.extended)
            adapt_optimizer(caller, update, has_slots=colocate_with is not None)
        elif caller is not None and values and sharding.model_dim is not None:
            # A scale of int8 is sharded because its weight is.
            weight_path = path.removesuffix("scale").rstrip("_")
            is_found = self._layouts.is_found(weight_path)
            _prepare_layers(callers, strategy.extended, is_found)
        return variable

    def _devices(self, colocate_with):
        if colocate_with is not None:
            return [variable.device for variable in colocate_with.values]
        rank = self._pipeline_rank
        devices = [
            device
            for stages in self._device_grid
            for device in stages[rank or 0]
        ]
        if rank is not None or len(self._device_grid[0]) == 1:
            return devices
        return [host_of(device) for device in devices]

    def _sharding(self, callers, path, initial, like, is_weight, kwargs):
        if like is None:
            like = self._made_like
        model_dim = data_dim = None
        if like is None:
            model_dim = self._layout_dim(callers, path, initial, kwargs)
        elif tuple(initial.shape) == sharding_of(like).shape:
            # States of an optimizer are sharded like their variable, and more.
            is_state = isinstance(callers[-1], keras.optimizers.Optimizer)
            found = state_sharding_of(like) if is_state else sharding_of(like)
            model_dim, data_dim = found.model_dim, found.data_dim
        sharding = Sharding(
            tuple(initial.shape),
            initial.dtype.size,
            len(self._device_grid),
            len(self._device_grid[0][0]),
            model_dim,
            data_dim,
        )
        if (
            self._optimizer_states.are_weights_sharded
            and like is None
            and is_weight
            and initial.dtype.is_floating
        ):
            data_dim = self._layouts.data_dim(path, tuple(initial.shape))
            return self._optimizer_states.weight_sharding(sharding, data_dim)
        return sharding

    def _layout_dim(self, callers, path, initial, kwargs):
        is_of_layer = isinstance(callers[-1], keras.layers.Layer)
        on_read = tf.VariableSynchronization.ON_READ
        if not is_of_layer or kwargs.get("synchronization") == on_read:
            return None
        declared = _declared_dim(callers, kwargs["name"])
        if declared is None:
            declared = sharded_call.scale_dim(
                callers[-1], kwargs["name"], len(initial.shape)
            )
        return self._layouts.split_dim(path, tuple(initial.shape), declared)


def _callers_and_path(name, initial_value, **_):
    """The creators of a variable, outermost first, or None, and its path.

    A model with a custom `call` is built by running it, and the variables of
    its layers are created afterwards. Then only the model's scope is open,
    which shows neither the layer nor the path.
    """
    callers = attributes.name_scope_callers() or [None]
    late = _late_variable(initial_value)
    if late is not None and callers == [None]:
        return callers, late.path
    if late is not None and isinstance(callers[-1], keras.layers.Layer):
        around = _layers_around(late, callers[-1], set()) or []
        return [*callers, *around], late.path
    return callers, f"{symbols.current_path()}/{name}"


def _zeros_like(initial):
    """An initial value of zeros, a tensor or a function, like another."""
    if callable(initial):
        return lambda: tf.zeros_like(initial())
    return tf.zeros_like(initial)


def _late_variable(initial_value, **_):
    """The Keras variable that is being created, if it is created late.

    `initial_value` is then a function that refers to it.
    """
    for cell in getattr(initial_value, "__closure__", None) or ():
        variable = cell.cell_contents
        if isinstance(variable, keras.Variable):
            path = f"{symbols.current_path()}/{variable.name}"
            return None if variable.path == path else variable
    return None


def _layers_around(variable, layer, seen):
    """The layers from below `layer` to the one that has a variable, or None."""
    seen.add(id(layer))
    if any(each is variable for each in attributes.direct_variables(layer)):
        return []
    for sublayer in attributes.sublayers(layer):
        if id(sublayer) not in seen:
            found = _layers_around(variable, sublayer, seen)
            if found is not None:
                return [sublayer, *found]
    return None


def _declared_dim(callers, name):
    """The dim by the `model_parallel_dims` of a layer around a variable.

    They have its path below that layer.
    """
    for depth, caller in enumerate(callers):
        dims = getattr(caller, "model_parallel_dims", None)
        if dims is not None:
            names = [layer.name for layer in callers[depth + 1 :]]
            return dims.get("/".join([*names, name]))
    return None


def _prepare_layers(callers, extended, is_found):
    apply_decision = functools.partial(
        sequence_model.apply_decision, extended.num_model_ranks
    )
    for layer in sharded_call.layers_with_rules(callers):
        sharded_call.attach(layer, apply_decision)
        layer.sharded_call.is_found &= is_found
        extended.rank_calls.sharded_calls.add(layer.sharded_call)
