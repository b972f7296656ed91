"""Cuts a model in two, so that the second half trains on cached activations."""

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import symbols
from tfscale.graphs.noting_scope import NotingScope
from tfscale.graphs.random_operations import draws_from_seed
from tfscale.graphs.random_operations import draws_from_state
from tfscale.mesh.models.wrapped_model import WrappedModel
from tfscale.pipeline.stages.graph import flatten_model
from tfscale.pipeline.stages.stages import cut as cut_graph
from tfscale.schedules.cut_points import cuts_from_names


def cut(model: keras.Model, layer: str) -> tuple[keras.Model, keras.Model]:
    """Cuts a model before a layer: a frozen prefix and a trainable suffix.

    `prefix.predict` computes activations once for all epochs, and the suffix
    is compiled and trained on them as any model. Both share the layers of the
    model, so `model.save` saves the trained suffix. Each record must always
    have the same activations, so the prefix must be frozen, see
    `tfscale.callbacks.LayerFreezing`, and have nothing random.

    Through `tfscale.data` activations and targets stay together by record,
    from memory or from a file: `tfscale.data.arrays((features, y))`, with
    `numpy.load(path, mmap_mode="r")` for features on disk. On a mesh call it,
    and `compile`, in the scope of the strategy; of a `tfscale.PipelineModel`
    it cuts the model inside, and the suffix may be wrapped again.

    Args:
        model: A functional or Sequential model, or a wrapped one.
        layer: Name of the layer with which the suffix begins, which may be in
            a nested model. Of several uses the first counts.

    Returns:
        The prefix and the suffix, functional models. Call `prefix.predict`
        with data in order and without augmentation, and again if a weight of
        the prefix has changed: nothing checks that.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If it is not functional, `layer` is none of its layers or
            the first; if other tensors cross too (skip connections, inputs,
            masks); if something before it is trainable, random, or adds to the
            loss.

    Reference: Liu et al., AutoFreeze (2021), section 4.2, "caching".

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import tfscale
    >>> model = keras.Sequential(
    ...     [keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(3))]
    ... )
    >>> model.layers[0].trainable = False
    >>> prefix, suffix = tfscale.cut(model, model.layers[1].name)
    >>> x = np.ones((8, 4), "float32")
    >>> features = prefix.predict(x, verbose=0)
    >>> data = tfscale.data.pipeline(
    ...     tfscale.data.arrays((features, x)), batch_size=4
    ... )
    >>> suffix.compile("sgd", "mse")
    >>> history = suffix.fit(data, epochs=2, verbose=0)
    """
    if isinstance(model, WrappedModel):
        model = model.model
    graph = flatten_model(model)
    if layer in {call.name for call in graph.calls}:
        # Others stay whole: Keras refuses two layers of one name in a model.
        graph = flatten_model(model, layer)
    names = [call.name for call in graph.calls]
    if len(names) < 2:
        raise ValueError(
            "A model must have two layers to be cut. Received: "
            f"{model.name!r} with {len(names)}."
        )
    cuts = cuts_from_names(names, [layer], 2)
    first, second = cut_graph(graph, cuts)
    _check_boundary(graph, first, second, layer)
    _check_frozen(graph, first)
    inputs = dict(zip(graph.inputs, graph.functional.inputs))
    [boundary] = second.inputs
    features = _run(first, inputs)[boundary]
    if symbols.get_keras_mask(features) is not None:
        raise ValueError(
            f"Masks cannot be cached. Received: layer {layer!r}, whose input "
            "has one. Cut after the layers that use it."
        )
    prefix = keras.Model(
        attributes.inputs_structure(graph.functional),
        features,
        name=f"{model.name}_prefix",
    )
    begin = keras.Input(batch_shape=features.shape, dtype=features.dtype)
    values = _run(second, {boundary: begin})
    suffix = keras.Model(
        begin,
        graph.pack_outputs([values[value] for value in graph.outputs]),
        name=f"{model.name}_suffix",
    )
    return prefix, suffix


def _run(stage, tensors):
    """The calls of a stage on symbolic tensors; adds what they return."""
    for call in stage.calls:
        if not isinstance(call.operation, keras.Operation):
            raise ValueError(
                "A nested model must receive its inputs unchanged to be cut. "
                f"Received: input {call.name!r}, of another dtype or with a "
                "mask. Convert it before the model."
            )
        args, kwargs = call.filled(tensors.__getitem__)
        results = keras.tree.flatten(call.operation(*args, **kwargs))
        tensors.update(zip(call.outputs, results))
    return tensors


def _check_boundary(graph, first, second, layer):
    makers = {v: call.name for call in first.calls for v in call.outputs}
    makers.update(zip(graph.inputs, (x.name for x in graph.functional.inputs)))
    boundary = [makers[value] for value in second.inputs]
    if len(boundary) == 1 and second.inputs[0] not in graph.inputs:
        return
    raise ValueError(
        "Exactly one tensor must cross the cut, made by a layer before it. "
        f"Received: layer {layer!r}, before which "
        f"{', '.join(map(repr, boundary))} cross (skip connections, inputs of "
        "the model or outputs). Cut where they have been joined, for example "
        "before a block."
    )


def _check_frozen(graph, stage):
    for call in stage.calls:
        for variable in call.variables:
            if variable.trainable:
                raise ValueError(
                    "All layers before the cut must be frozen. Received: "
                    f"trainable variable {variable.path!r}. Set `trainable = "
                    f"False` for layer {call.name!r}, or cut before it."
                )

    @tf.function(autograph=False)
    def run(*inputs):
        tensors = dict(zip(graph.inputs, inputs))
        for call in stage.calls:
            reason = _difference_in_training(call, tensors)
            if reason is not None:
                raise ValueError(
                    "Layers before the cut must compute the same in training "
                    f"and in `predict`. Received: layer {call.name!r}, which "
                    f"{reason}. Remove it, or cut before it."
                )

    # With any number of rows: only the graph is looked at.
    inputs = [graph.specs[value] for value in graph.inputs]
    run.get_concrete_function(
        *(tf.TensorSpec(each.shape, each.dtype) for each in inputs)
    )


def _difference_in_training(call, tensors):
    """The first difference of a layer in training, or None; in a graph."""
    operations = tf.compat.v1.get_default_graph().get_operations
    number = len(operations())
    with NotingScope(collect_losses=True) as scope:
        call.run(tensors, training=True)
    types = [op.type for op in operations()[number:]]
    if any(map(draws_from_state, types)) or (
        scope.changed and any(map(draws_from_seed, types))
    ):
        return "draws random numbers in training"
    if scope.changed:
        paths = ", ".join(repr(each.path) for each in scope.changed)
        return f"updates its statistics in training: {paths}"
    return "adds to the loss" if scope.losses else None
