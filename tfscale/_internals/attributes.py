"""Private attributes of objects of Keras and TensorFlow, read here only.

The tables beside list each, with why.
"""

import collections
import contextlib
import functools
import inspect
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import instances
from tfscale._internals import symbols

# The gradient that a `tf.custom_gradient` has registered for an operation.
GRADIENT_TYPE = "_gradient_op_type"
# The shapes of an operation's outputs, by `as_graph_def(add_shapes=True)`.
OUTPUT_SHAPES = "_output_shapes"
# The operations that one has to be on the same device with.
COLOCATED_WITH = "_class"
# A loop or branch that its executor runs as a part of the graph around it.
LOWERED = "_lower_using_switch_merge"
# A function that is called, and not copied into the one that calls it.
NOT_INLINED = {symbols.NO_INLINE: True}

_STATELESS_SCOPE = "stateless_scope"
_OLD_FORMAT = "use_legacy_config"


def name_scope_callers() -> list[Any]:
    """The layers and optimizers that run in this thread, outermost first.

    The last one creates variables and calls layers now.
    """
    scopes = symbols.global_state.get_global_attribute("name_scope_stack") or ()
    return [scope.caller for scope in scopes]


def is_stateless() -> bool:
    """Whether a `keras.StatelessScope` is open in this thread."""
    scope = symbols.global_state.get_global_attribute(_STATELESS_SCOPE)
    return scope is not None


@contextlib.contextmanager
def variables_created_eagerly() -> Iterator[None]:
    """Within it, variables are created even where Keras would wait."""
    state = symbols.global_state
    scope = state.get_global_attribute(_STATELESS_SCOPE)
    state.set_global_attribute(_STATELESS_SCOPE, None)
    try:
        with tf.init_scope():
            yield
    finally:
        state.set_global_attribute(_STATELESS_SCOPE, scope)


def automatic_names() -> dict[str, int]:
    """How often Keras has given each name in this thread; a mutable dict."""
    return symbols.global_state.get_global_attribute(
        "object_name_uids",
        default=collections.defaultdict(int),
        set_to_default=True,
    )


def asks_for_xla(function: Any) -> bool:
    """Whether XLA is to compile a `tf.function`, perhaps wrapped by Keras."""
    # Keras wraps it by `functools.wraps`, which copies attributes but not
    # properties such as `function_spec`.
    return bool(getattr(function, "_jit_compile", False))


def predicting_model(function: Any) -> keras.Model | None:
    """The model of the function that replicas run in `predict`, or None."""
    name = getattr(function, "__qualname__", "")
    if not name.endswith("make_predict_function.<locals>.one_step_on_data"):
        return None
    return inspect.getclosurevars(inspect.unwrap(function)).nonlocals["self"]


def obj_type(model: keras.Model) -> str:
    """How Keras finds the attributes of a model to save."""
    return model._obj_type()


def writes_old_format() -> bool:
    """Whether Keras asks for configurations for an HDF5 file."""
    return bool(symbols.global_state.get_global_attribute(_OLD_FORMAT, None))


def options_of_process() -> tf.compat.v1.ConfigProto:
    """A copy of the options that `tf.config` has set, such as threads."""
    return symbols.eager_context.context().config


def put_key_value(key: str, value: str) -> None:
    """Gives a value to all processes of a cluster; the first one counts."""
    with contextlib.suppress(tf.errors.AlreadyExistsError):
        symbols.eager_context.context().set_config_key_value(key, value)


def limit_joining(jobs: Mapping[str, int], leader: str, seconds: float) -> None:
    """Lets TensorFlow wait so long for all tasks of a cluster, not for ever.

    It is set as `tf.distribute.MultiWorkerMirroredStrategy` would set it, which
    leaves it then. `jobs` has the number of tasks of each job, `leader` is the
    task that runs the service, `"/job:worker/replica:0/task:0"` for instance.
    """
    experimental = tf.compat.v1.ConfigProto().experimental
    coordinated = experimental.coordination_config.coordinated_job_list
    for name, count in jobs.items():
        coordinated.add(name=name, num_tasks=count)
    context = symbols.eager_context.context()
    context.configure_coordination_service(
        service_type="standalone",
        service_leader=leader,
        cluster_register_timeout_in_ms=max(1, int(seconds * 1_000)),
        coordinated_jobs=list(coordinated),
    )
    # Else the leader has no limit for a task that never registers.
    context.coordination_service.cluster_register_with_barrier = True


def abort_collectives(message: str) -> None:
    """Ends all exchanges between workers with an `AbortedError`, later too."""
    symbols.eager_context.context().abort_collective_ops(
        tf.errors.ABORTED, message
    )


def get_key_value(key: str, timeout_in_ms: int) -> str | None:
    """The value of a process of the cluster; None if there is none in time."""
    context = symbols.eager_context.context()
    try:
        return context.get_config_key_value(key, timeout_in_ms)
    except tf.errors.DeadlineExceededError:
        return None


def used_seed_generator() -> keras.random.SeedGenerator | None:
    return symbols.global_state.get_global_attribute(
        symbols.GLOBAL_SEED_GENERATOR
    )


@contextlib.contextmanager
def global_seeds(generator: Any) -> Iterator[None]:
    """Within it, Keras draws from `generator` if this thread has none."""
    state, name = symbols.global_state, symbols.GLOBAL_SEED_GENERATOR
    before = state.get_global_attribute(name)
    state.set_global_attribute(name, generator if before is None else before)
    try:
        yield
    finally:
        state.set_global_attribute(name, before)


def global_generator() -> tf.random.Generator | None:
    return symbols.stateful_random_ops.global_generator


# --- layers and models ----------------------------------------------------


def flatten_layers(
    layer: keras.Layer, *, include_self: bool = True
) -> list[keras.Layer]:
    """A layer and all layers in it, each once, as they were made."""
    found = [layer] if include_self else []
    seen, waiting = set(), collections.deque(layer._layers)
    while waiting:
        each = waiting.popleft()
        if id(each) not in seen:
            seen.add(id(each))
            found.append(each)
            waiting.extendleft(each._layers)
    return found


def direct_variables(layer: keras.Layer) -> list[keras.Variable]:
    """The weights of a layer itself, without those of layers in it."""
    inner = flatten_layers(layer, include_self=False)
    of_others = {id(weight) for each in inner for weight in each.weights}
    return [weight for weight in layer.weights if id(weight) not in of_others]


def optimized_variables(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """The variables that an optimizer updates by default."""
    return optimizer._trainable_variables


def with_iterations(iterations: keras.Variable) -> dict[str, Any]:
    """Members of a subclass of an optimizer that counts its updates there."""
    return {"_iterations": property(lambda self: iterations)}


def take_state(optimizer: keras.Optimizer, other: keras.Optimizer) -> None:
    """Gives an optimizer the state of another of its class.

    It finds its slots by the variables of TensorFlow that it was built for.
    """
    vars(optimizer).update(vars(other))


def direct_generators(layer: keras.Layer) -> list[keras.random.SeedGenerator]:
    """The generators that are attributes of a layer."""
    found = instances.held_by(layer)
    kind = keras.random.SeedGenerator
    return list({id(x): x for x in found if isinstance(x, kind)}.values())


def noted_losses(layer: keras.Layer) -> list[Any]:
    """The layer's list of losses given to `add_loss`."""
    return layer._losses


def sublayers(layer: keras.Layer) -> list[keras.Layer]:
    """The layers right below a layer."""
    return list(layer._layers)


def inputs_structure(functional: keras.Model) -> Any:
    """The symbolic inputs of a model, in the structure of its data."""
    if isinstance(functional, keras.Sequential):
        return functional.inputs[0]
    return functional.input


def standardize_inputs(functional: keras.Model, x: Any) -> list[tf.Tensor]:
    """The data of a batch, one tensor for each input."""
    same = keras.Model(functional.input, functional.inputs, name="inputs")
    return keras.tree.flatten(same.call(x))


def nodes_of(functional: keras.Model) -> list[Any]:
    """The calls of a functional model, in an order in which they can run."""
    by_depth = functional._nodes_by_depth
    return [
        node
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
    ]


@functools.cache
def functional_class() -> Any:
    """The class that `keras.Model(inputs, outputs)` makes."""
    x = keras.Input((1,), name="x")
    return type(keras.Model(x, x, name="functional"))


def functional_in(model: keras.Model) -> keras.Model | None:
    """The functional model that a built sequential one is inside.

    It has the very list of inputs that the sequential model returns.
    """
    if not isinstance(model, keras.Sequential):
        return None
    kind, inputs = functional_class(), getattr(model, "inputs", None)
    found = instances.attributes_of(model).values()
    return next(
        (x for x in found if isinstance(x, kind) and x.inputs is inputs), None
    )


def functional_of(layer: Any) -> keras.Model | None:
    """The functional model that a call of `layer` runs, or None."""
    if isinstance(layer, keras.Sequential):
        overrides_call = layer.__class__.call is not keras.Sequential.call
        return None if overrides_call else functional_in(layer)
    functional = functional_class()
    if not isinstance(layer, functional):
        return None
    return layer if layer.__class__.call is functional.call else None


# --- variables ------------------------------------------------------------


def value_of(variable: keras.Variable) -> Any:
    """The variable of TensorFlow in a Keras variable, also in a scope.

    `variable.value` may be a tensor of a trace.
    """
    return variable._value


def make_value_anew(variable: keras.Variable, value: Any) -> None:
    """Gives a Keras variable another variable of TensorFlow.

    The strategy in scope creates it. It keeps the name of the layer and the
    number of the old one, by which `exclude_from_weight_decay` of an optimizer
    knows variables.
    """
    before = variable.value
    layer = before.name.rpartition("/")[0]
    with tf.name_scope(f"{layer}/" if layer else ""):
        variable._value = tf.Variable(
            value,
            dtype=variable.dtype,
            trainable=variable.trainable,
            name=variable.name,
            aggregation=before.aggregation,
            synchronization=before.synchronization,
        )
    for component, old in zip(_components(variable.value), _components(before)):
        component._unique_id = old._unique_id


def _components(variable):
    return getattr(variable, "values", (variable,))


# --- losses and optimizers ------------------------------------------------


def is_step_of_keras(step: Any) -> bool:
    """Whether a method of a model is Keras' `train_step` or `test_step`."""
    steps = keras.Model.train_step, keras.Model.test_step
    return getattr(step, "__func__", None) in steps


def compile_loss_of(model: keras.Model) -> Any:
    return model._compile_loss


def metric_function(metric: keras.metrics.MeanMetricWrapper) -> Any:
    """The function that a metric takes the mean of, with its arguments."""
    return functools.partial(metric._fn, **metric._fn_kwargs)


def flat_losses(compile_loss: Any) -> list[Any]:
    """The losses given to `compile`, each with its path and weight."""
    return compile_loss._flat_losses


def with_flat_losses(losses: list[Any]) -> dict[str, Any]:
    """Members of a subclass of `CompileLoss` that has other losses."""
    return {"_flat_losses": property(lambda self: losses)}


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    return dict(model._compile_config.config)


def with_losses(compiled: Any, added: Any) -> dict[str, Any]:
    """Members of a subclass of a model whose `compute_loss` uses other losses.

    `compiled` gives what stands for its `CompileLoss`, and `added` the list of
    what layers have added.
    """
    return {
        "_compile_loss": property(lambda self: compiled()),
        "losses": property(lambda self: added()),
    }


# --- graphs and datasets --------------------------------------------------


_RECOMPUTING = inspect.getsourcefile(inspect.unwrap(tf.custom_gradient))


def is_recomputed(op: tf.Operation) -> bool:
    """Whether an operation was made by the function of a `recompute_grad`."""
    return any(
        frame.name == "inner" and frame.filename == _RECOMPUTING
        for frame in op.traceback
    )


def keep_side_effects_of_branches(graph: tf.Graph) -> None:
    """Keeps assertions and prints in branches of a `tf.cond`."""
    graph._add_control_dependencies = True


def keep_outside_of_clusters(op: tf.Operation) -> None:
    """Has XLA compile an operation in no cluster of a function."""
    op._set_attr("_XlaCompile", tf.compat.v1.AttrValue(b=False))


def replace_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Replaces an operation's input by a tensor of the same shape."""
    op._update_input(index, tensor)


# --- parameter servers ----------------------------------------------------


def choose_worker_values(values: list[Any]) -> Any:
    """The value of worker n in the n-th of some `PerWorkerValues`."""
    return type(values[0])([v._values[n] for n, v in enumerate(values)])


# --- steps that were traced ------------------------------------------------


def step_function(function: Any) -> Any:
    """The `tf.function` of one batch, of the train or test function of a model.

    None of an eager model, and of a function that is not Keras'.
    """
    function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        return None
    kind = tf.types.experimental.PolymorphicFunction
    found = inspect.getclosurevars(function).nonlocals.get("one_step_on_data")
    found = found and inspect.unwrap(found, stop=lambda f: isinstance(f, kind))
    return found if isinstance(found, kind) else None


def concrete_functions(function: Any) -> list[Any]:
    """The traces of a `tf.function`, one for each kind of arguments."""
    return list(function._list_all_concrete_functions())


def variables_used_by(concrete: Any) -> Iterator[tf.Variable]:
    """The variables that a traced function reads or assigns, in no order.

    Functions that it calls count too, and each component of a variable of a
    strategy. Deleted variables are left out.
    """
    for reference in concrete.graph._weak_variables:
        variable = reference()
        if variable is not None:
            yield variable


def is_iterator(tensor: tf.Tensor) -> bool:
    """Whether an eager tensor is the handle of an iterator over a dataset."""
    return (
        tensor.dtype == tf.resource
        and not tf.is_symbolic_tensor(tensor)
        and "::IteratorResource" in str(tensor)
    )


def whole_of(variable: tf.Variable) -> tf.Variable:
    """The strategy's variable with this component, or the variable."""
    reference = getattr(variable.handle, "_distributed_container", None)
    container = None if reference is None else reference()
    return variable if container is None else container


def creation_number(variable: tf.Variable) -> int:
    """A number that grows with each variable that a program creates."""
    return int(variable._unique_id.rpartition("_")[-1])
