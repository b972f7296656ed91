"""Opens a layer that is made of layers, so that a cut may go through it.

A layer with a `call` of its own is one call of a model. Where it has so much
of the work that no stage can take it (the encoder of a vision transformer of
keras_hub), and its `call` does nothing but call Keras layers and operations,
it is a functional model in all but name: it is called on symbolic tensors, and
what it calls takes its place.
"""

import dataclasses
import inspect

import keras

from tfscale import _internals
from tfscale.graphs.noting_scope import NotingScope
from tfscale.pipeline.stages.graph import Call
from tfscale.pipeline.stages.graph import Flattener
from tfscale.pipeline.stages.graph import Graph
from tfscale.pipeline.stages.graph import Value


def opened(graph: Graph, index: int) -> Graph | None:
    """The model with the calls inside of call `index` in its place.

    Returns:
        None if the layer is not made of layers, or does more than call them:
        uses a variable, draws numbers, adds a loss, takes or makes masks, or
        does another thing in training than without.
    """
    call = graph.calls[index]
    if not _may_open(call, graph):
        return None
    try:
        with_training, without = (
            _as_functional(call, graph.specs, training)
            for training in (True, False)
        )
        if with_training is None or without is None:
            return None
        said = _described(with_training, True)
        if said is None or said != _described(without, False):
            return None
        flattener = Flattener(dict(graph.specs))
        made = flattener.add(without, call.inputs)
    except Exception:  # whatever a layer raises that cannot be symbolic
        return None
    if any(_internals.get_keras_mask(x) is not None for x in _tensors(without)):
        return None
    held = {id(v) for inner in flattener.calls for v in inner.variables}
    if not {id(v) for v in call.variables} <= held:
        return None
    place = dict(zip(call.outputs, made))

    def renamed(structure):
        return keras.tree.map_structure(
            lambda x: place.get(x, x) if isinstance(x, Value) else x, structure
        )

    after = [
        dataclasses.replace(
            each, args=renamed(each.args), kwargs=renamed(each.kwargs)
        )
        for each in graph.calls[index + 1 :]
    ]
    return dataclasses.replace(
        graph,
        calls=(*graph.calls[:index], *flattener.calls, *after),
        outputs=tuple(place.get(value, value) for value in graph.outputs),
        specs=flattener.specs,
    )


def _may_open(call: Call, graph):
    layer = call.operation
    return (
        isinstance(layer, keras.Layer)
        and type(layer).__call__ is keras.Layer.__call__
        and bool(_internals.sublayers(layer))
        and layer.activity_regularizer is None
        and "mask" not in inspect.signature(layer.call).parameters
        and not call.kwargs
        and all(isinstance(x, Value) for x in keras.tree.flatten(call.args))
        and sum(each.operation is layer for each in graph.calls) == 1
        # Keras would cast.
        and all(
            "float" not in graph.specs[value].dtype
            or graph.specs[value].dtype == layer.compute_dtype
            for value in call.inputs
        )
        and all(
            _internals.get_keras_mask(spec) is None
            for spec in graph.specs.values()
        )
    )


def _as_functional(call, specs, training):
    """The functional model that a layer's `call` is, or None."""
    layer = call.operation
    inputs = keras.tree.map_structure(
        lambda value: keras.Input(
            batch_shape=specs[value].shape,
            dtype=specs[value].dtype,
            name=f"input_{value.number}",
        ),
        call.args,
    )
    opener = _Opener(layer)
    with NotingScope(collect_losses=True) as scope:
        opener(*inputs, training=training)
    if scope.read or scope.losses:
        return None
    return keras.Model(
        keras.tree.flatten(inputs),
        keras.tree.flatten(opener.made),
        name=layer.name,
    )


class _Opener(keras.Layer):
    """Calls another layer's `call` on symbolic tensors, in place of itself.

    As a layer, because that is how Keras hands `training` on to what is inside.
    """

    def __init__(self, layer):
        super().__init__(name=layer.name, dtype=layer.dtype_policy)
        self.built = True
        self._call = layer.call
        self._takes_training = (
            "training" in inspect.signature(layer.call).parameters
        )

    def call(self, *inputs, training=None):
        """Never run: only its symbolic outputs are asked for."""
        raise NotImplementedError

    def compute_output_spec(self, *inputs, training=None):
        """See `keras.Layer`."""
        options = {"training": training} if self._takes_training else {}
        self.made = self._call(*inputs, **options)
        return keras.tree.map_structure(
            lambda x: keras.KerasTensor(x.shape, x.dtype), self.made
        )


def _described(functional, training):
    """Equal for models that do the same, but for `training`; or None."""
    numbers = {id(x): n for n, x in enumerate(functional.inputs)}
    described = []
    for node in _internals.nodes_of(functional):
        if node.is_input:
            continue
        args, kwargs = node.arguments.fill_in(numbers)
        kwargs = dict(kwargs)
        given = kwargs.pop("training", None)
        constants = keras.tree.flatten((args, kwargs))
        if given not in (None, training) or any(
            hasattr(x, "shape") for x in constants
        ):
            return None
        operation = node.operation
        what = id(operation)
        if not isinstance(operation, keras.Layer):
            own = {
                name: repr(value)
                for name, value in _internals.attributes_of(operation).items()
                if name != "name" and name[0] != "_"
            }
            what = (type(operation), repr(own))
        described.append((what, repr((args, kwargs))))
        for output in node.outputs:
            numbers[id(output)] = len(numbers)
    return described, [numbers[id(x)] for x in functional.outputs]


def _tensors(functional):
    for node in _internals.nodes_of(functional):
        yield from node.outputs
