"""A functional model as a flat list of layer calls, branch by branch.

Nested models are opened, so that a cut may go through them; a layer that is
called twice has two calls. Tensors are numbers ("values"): a cut only needs the
calls that make and use them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import symbols
from tfscale._internals.releases import called_in_model


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor that one call makes and others use."""

    number: int


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a layer, a `keras.ops` operation, or another callable.

    Arguments have `Value`s where tensors go; those of the result are flattened.
    `without` has ids of variables of the layer that only other calls of it use,
    `flops` counts those of the forward, for one example. Both are traced.
    """

    name: str
    operation: Callable
    args: tuple
    kwargs: dict
    outputs: tuple[Value, ...]
    without: frozenset[int] = frozenset()
    flops: int = 0

    @property
    def inputs(self) -> list[Value]:
        """The values used, in order, each as often as it is used."""
        flat = keras.tree.flatten((self.args, self.kwargs))
        return [x for x in flat if isinstance(x, Value)]

    @property
    def variables(self) -> list[keras.Variable]:
        """The layer's, and its generators', metrics' and arguments'."""
        flat = keras.tree.flatten((self.args, self.kwargs))
        variables = [
            *getattr(self.operation, "variables", []),
            *getattr(self.operation, "metrics_variables", []),
            *(x for x in flat if isinstance(x, keras.Variable)),
        ]
        return [v for v in variables if id(v) not in self.without]

    def filled(self, function: Callable[[Value], Any]) -> tuple[tuple, dict]:
        """The arguments, with what a function makes of each `Value`."""
        return keras.tree.map_structure(
            lambda x: function(x) if isinstance(x, Value) else x,
            (self.args, self.kwargs),
        )

    def run(self, tensors: dict[Value, Any], training: bool) -> None:
        """Calls the layer on `tensors` and adds what it returns to them."""
        args, kwargs = self.filled(tensors.__getitem__)
        call = called_in_model(self.operation, training)
        results = keras.tree.flatten(call(*args, **kwargs))
        tensors.update(zip(self.outputs, results))


@dataclasses.dataclass(frozen=True)
class Graph:
    """A model as calls between its flattened inputs and outputs.

    Attributes:
        calls: In an order in which they can run.
        specs: Shape and dtype of every value, with `None` for the batch.
        multiples: Rows of a value for each row of the batch, if not one: with
            frames folded into the batch, say.
        length: The size that unknown sizes of inputs have, if any.
    """

    functional: keras.Model
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    calls: tuple[Call, ...]
    specs: dict[Value, keras.KerasTensor]
    multiples: dict[Value, int] = dataclasses.field(default_factory=dict)
    length: int | None = None

    @property
    def layers(self) -> list[keras.Layer]:
        """The layers that are called, and those inside of them."""
        return [
            layer
            for call in self.calls
            if isinstance(call.operation, keras.Layer)
            for layer in attributes.flatten_layers(call.operation)
        ]

    def differentiable(self) -> set[Value]:
        """The values that have gradients: trainable variables made them."""
        found: set[Value] = set()
        for call in self.calls:
            if not found.isdisjoint(call.inputs) or any(
                variable.trainable for variable in call.variables
            ):
                found.update(call.outputs)
        return found

    def with_rows(self, value: Value, rows: int) -> keras.KerasTensor:
        """The spec of a value for a batch of `rows` rows."""
        spec = self.specs[value]
        if not spec.shape or spec.shape[0] is not None:
            return spec
        rows *= self.multiples.get(value, 1)
        return keras.KerasTensor((rows, *spec.shape[1:]), spec.dtype)

    def flatten_inputs(self, x) -> list[tf.Tensor]:
        """One tensor per input, from the structure that a user feeds."""
        return attributes.standardize_inputs(self.functional, x)

    def pack_outputs(self, outputs):
        """The outputs in the structure that the model returns."""
        packed = keras.tree.pack_sequence_as(self.functional.output, outputs)
        if isinstance(packed, (list, tuple)) and len(packed) == 1:
            return packed[0]
        return packed


def flatten_model(model: keras.Model, layer: str | None = None) -> Graph:
    """Opens up a functional or Sequential model.

    Nested models are opened too; given the name of a layer, those that have it.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If the model is not functional: a `call` of its own hides
            from Keras, and so from here, in which order layers are called.
    """
    functional = attributes.functional_of(model)
    if functional is None:
        raise _not_functional(model)
    flattener = _Flattener(layer)
    inputs = [flattener.new_value(x) for x in functional.inputs]
    outputs = flattener.add(functional, inputs)
    return Graph(
        functional,
        tuple(inputs),
        tuple(outputs),
        tuple(_branch_by_branch(flattener.calls, outputs)),
        flattener.specs,
    )


def _branch_by_branch(calls: list[Call], outputs: list[Value]) -> list[Call]:
    """The calls in another order: each after the calls that its arguments need.

    Keras orders them by depth, through parallel branches at the same time, so
    that no cut is between them. Calls of one layer stay in their order, in
    which they draw random numbers and update statistics.

    x ─┬─► a ─► b ─┬─► add        Keras:            a c b d add
       └─► c ─► d ─┘              branch by branch: a b c d add
    """
    maker = {v: index for index, call in enumerate(calls) for v in call.outputs}
    needs = []
    last_of: dict[int, int] = {}
    for index, call in enumerate(calls):
        operation = id(call.operation)
        needed = [maker[value] for value in call.inputs if value in maker]
        needs.append([*needed, last_of.get(operation, index)])
        last_of[operation] = index
    # The next one is the last; calls that lead to no output come at the end.
    todo = [
        *reversed(range(len(calls))),
        *(maker[value] for value in reversed(outputs) if value in maker),
    ]
    ordered: dict[int, Call] = {}
    while todo:
        index = todo[-1]
        missing = [n for n in needs[index] if n not in ordered and n != index]
        todo.extend(reversed(missing))
        if not missing:
            ordered.setdefault(index, calls[index])
            todo.pop()
    return list(ordered.values())


class _Flattener:
    def __init__(self, layer):
        self._layer = layer
        self.calls = []
        self.specs = {}

    def new_value(self, keras_tensor: keras.KerasTensor) -> Value:
        value = Value(len(self.specs))
        self.specs[value] = keras_tensor
        return value

    def add(self, functional: keras.Model, inputs: list[Value]) -> list[Value]:
        """Adds the calls of a model on `inputs`, returns its outputs."""
        values = {id(x): v for x, v in zip(functional.inputs, inputs)}
        for node in attributes.nodes_of(functional):
            if not node.input_tensors or any(
                id(x) not in values for x in node.input_tensors
            ):
                continue
            args, kwargs = node.arguments.fill_in(values)
            outputs = self._add_call(node.operation, args, kwargs, node.outputs)
            values.update(zip(map(id, node.outputs), outputs))
        return [values[id(x)] for x in functional.outputs]

    def _add_call(self, operation, args, kwargs, outputs):
        nested = attributes.functional_of(operation)
        if nested is not None and self._opens(nested, args, kwargs):
            inputs = keras.tree.flatten(args)
            masks = keras.tree.flatten(kwargs.get("mask"))
            if len(masks) < len(inputs):
                masks = [None] * len(inputs)
            # Keras gives the `training` of the model to whatever is in it,
            # even where a nested model was called with another one.
            given = zip(inputs, masks, nested.inputs)
            return self.add(nested, [self._prepare(*each) for each in given])
        made = tuple(self.new_value(x) for x in outputs)
        self.calls.append(Call(operation.name, operation, args, kwargs, made))
        return made

    def _opens(self, nested, args, kwargs):
        """Whether Keras would pass `args` to the nested model unchanged.

        If not, or with more than inputs, masks and `training`, the nested
        model is one call like any other.
        """
        inputs = keras.tree.flatten(args)
        names = (x.name for x in attributes.flatten_layers(nested))
        return (
            (self._layer is None or self._layer in names)
            and set(kwargs) <= {"training", "mask"}
            and len(args) == 1
            and isinstance(args[0], dict)
            == isinstance(attributes.inputs_structure(nested), dict)
            and len(inputs) == len(nested.inputs)
            and all(
                isinstance(v, Value)
                and len(self.specs[v].shape) == len(x.shape)
                for v, x in zip(inputs, nested.inputs)
            )
        )

    def _prepare(self, value, mask, keras_tensor):
        """The value as input of a nested model: in its dtype, with a mask."""
        dtype = keras_tensor.dtype
        if self.specs[value].dtype == dtype and mask is None:
            return value

        def prepare(x, mask=None):
            result = tf.cast(tf.identity(x), dtype)
            if mask is None:
                mask = symbols.get_keras_mask(x)
            if mask is not None:
                symbols.set_keras_mask(result, mask)
            return result

        made = self.new_value(keras_tensor)
        kwargs = {} if mask is None else {"mask": mask}
        self.calls.append(
            Call(keras_tensor.name, prepare, (value,), kwargs, (made,))
        )
        return made


def _not_functional(model):
    if not isinstance(model, keras.Model):
        return TypeError(
            f"`model` must be a `keras.Model`. Received: {model!r}."
        )
    if isinstance(model, keras.Sequential) and not model.built:
        return ValueError(
            "A Sequential model must be built before it can be cut. Received: "
            f"{model.name!r}, which does not know its input shape. Begin it "
            "with `keras.Input(shape)`, or call `model.build(input_shape)`."
        )
    return ValueError(
        "Only Sequential and functional models can be cut into stages. "
        f"Received: {model.name!r} of type {type(model).__name__}, whose "
        "custom `call` hides the order of its layers. Write it as "
        "`keras.Model(inputs, outputs)`; its layers may have any `call`."
    )
