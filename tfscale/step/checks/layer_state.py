"""State that layers keep between calls: counters, running means, codebooks.

On one device a layer is called once a step, with the whole batch. Microbatches
call it more often, and a replica passes only its rows, so the values that it
assigns differ. Metrics and seeds are handled elsewhere.
"""

import warnings
import weakref
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import layers as keras_layers
from tfscale.graphs import walks

# Models with a warning about replicas, and about microbatches: one each.
_warned_on_replicas: weakref.WeakSet[keras.Model] = weakref.WeakSet()
_warned_in_microbatches: weakref.WeakSet[keras.Model] = weakref.WeakSet()


_ASSIGNMENTS = frozenset(
    ["AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp"]
)
_CHANGED_TWICE = (
    " A `tf.Variable` is changed once more, by a trial with the whole batch: "
    "let a layer create it by `add_weight`."
)


class Changes:
    """The variables to which a replica's layers assign values of its rows.

    `replica_data` has the data of each replica of this process; this one joins.
    """

    def __init__(self, model: keras.Model, data: Sequence, replica_data: list):
        self._model = model
        self._is_first = not replica_data
        self._data = data
        self._replica_data = replica_data
        self._paths: dict[str, None] = {}
        # A variable with an aggregation is the same on all replicas.
        self._state = {
            id(attributes.value_of(variable)): variable.path
            for layer in attributes.flatten_layers(model)
            if not keras_layers.is_of_keras(layer.__class__.call)
            for variable in _not_trained(layer)
            if variable.aggregation in (None, "none")
        }
        optimizer = model.optimizer.variables if model.optimizer else []
        known = [*model.variables, *optimizer, *model.metrics_variables]
        self._of_keras = {id(attributes.value_of(v)) for v in known}
        replica_data.append(data)

    @property
    def data_of_others(self) -> list[Any]:
        """The data of the other replicas of this process so far."""
        mine = set(map(id, self._data))
        return [
            x for data in self._replica_data for x in data if id(x) not in mine
        ]

    def note(self, variable: tf.Variable, value: Any) -> None:
        """Notes that a value is assigned to a variable."""
        path = self._state.get(id(variable))
        # Of a layer or a loss that holds a variable of TensorFlow, or a global.
        if (
            id(variable) not in self._of_keras
            and variable.aggregation == tf.VariableAggregation.NONE
        ):
            path = variable.name.partition(":")[0]
        if (
            path is not None
            and tf.is_symbolic_tensor(value)
            and _is_of_shard(value, self._data, self.data_of_others)
        ):
            self._paths[path] = None

    def note_since(self, graph: tf.Graph, num_before: int) -> None:
        """Notes what operations of a graph assign, after the first ones."""
        for handle, value in assignments(graph, num_before):
            variable = attributes.container_of(handle)
            if variable is not None:
                self.note(variable, value)

    def warn(self) -> None:
        """Warns, once for a model, of the noted variables."""
        if (
            not self._is_first
            or not self._paths
            or self._model in _warned_on_replicas
        ):
            return
        _warned_on_replicas.add(self._model)
        warnings.warn(
            "A layer sees the rows of one replica, and on one device those of "
            f"the whole batch. Received: {_list(self._paths)}, to which a call "
            "assigns what comes from its rows: each replica keeps its own, and "
            "that of the first one is saved. Make such a variable by "
            "`add_weight(..., aggregation='mean')`, of which the mean over "
            "replicas is taken, or sum over replicas what is assigned.",
            stacklevel=2,
        )


def warn_in_microbatches(
    model: keras.Model,
    changed: Iterable[keras.Variable],
    assigned: Iterable[str] = (),
) -> None:
    """Warns, once for a model, of variables that each microbatch changes.

    `assigned` names variables of TensorFlow, which the trial changes too.
    """
    if model in _warned_in_microbatches:
        return
    layers = attributes.flatten_layers(model)
    state = {id(v) for layer in layers for v in _not_trained(layer)}
    paths = {v.path: None for v in changed if id(v) in state}
    names = dict.fromkeys(assigned)
    paths |= names
    if not paths:
        return
    _warned_in_microbatches.add(model)
    warnings.warn(
        "With GradientAccumulation a layer is called once per microbatch, and "
        f"on one device once per batch. Received: {_list(paths)}, which each "
        "call changes. A counter, or an average of what each call sees, comes "
        "out differently. Train without the callback if that matters."
        + _CHANGED_TWICE
        * bool(names),
        stacklevel=2,
    )


def assignments(
    graph: tf.Graph, num_before: int = 0
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """The handles of TensorFlow's variables that are assigned, and the values.

    Not inside of functions and branches, and not by the first operations of the
    graph. In a `StatelessScope` those of Keras are not assigned.
    """
    outside = {id(x): handle for handle, x in getattr(graph, "captures", ())}
    found = [
        (outside.get(id(op.inputs[0])), op.inputs[1])
        for op in graph.get_operations()[num_before:]
        if op.type in _ASSIGNMENTS
    ]
    return [(handle, value) for handle, value in found if handle is not None]


def assigned_names(graph: tf.Graph, num_before: int = 0) -> list[str]:
    """The names of the variables of `assignments`."""
    names = [
        attributes.variable_name(h) for h, _ in assignments(graph, num_before)
    ]
    return [name for name in names if not name.startswith("tfscale/")]


def _is_of_shard(value, data, others):
    """Whether a tensor is computed from one replica's rows only."""
    # One operation may have several outputs: the iterator of a dataset.
    refs = walks.reachable([value.ref()], _inputs_of)
    tensors = [ref.deref() for ref in refs]
    made_of = set(map(id, tensors))
    return (
        not any("Collective" in tensor.op.type for tensor in tensors)
        and made_of.isdisjoint(map(id, others))
        and (not made_of.isdisjoint(map(id, data)) or _adds_rows(value, data))
    )


def _inputs_of(ref):
    tensor = ref.deref()
    # A branch, a loop or a function captures what is outside of it.
    captures = getattr(tensor.graph, "captures", ())
    outside = [x for x, inside in captures if inside is tensor]
    inputs = outside or tensor.op.inputs
    return [x.ref() for x in inputs if tf.is_symbolic_tensor(x)]


def _adds_rows(value, data):
    while value.op.type in ("Cast", "Identity"):
        (value,) = value.op.inputs
    rows = data[0].shape[0]
    return (rows or 0) > 1 and any(
        tf.get_static_value(x) == rows
        for x in value.op.inputs
        if value.op.type == "AddV2" and x.shape.rank == 0
    )


def _not_trained(layer):
    if isinstance(layer, keras.layers.BatchNormalization):
        # Its averages are replaced by those of the whole batch.
        return []
    return [v for v in attributes.direct_variables(layer) if not v.trainable]


def _list(paths):
    return f"the variables {', '.join(map(repr, paths))}"
