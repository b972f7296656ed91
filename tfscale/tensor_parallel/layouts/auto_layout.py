"""A layout map for a model, found from types and shapes."""

import random
import re
import warnings
from collections.abc import Callable

import keras
import numpy as np

from tfscale._internals import attributes
from tfscale.graphs.noting_scope import outside_scopes
from tfscale.tensor_parallel.layouts.layout_search import LayoutPlan
from tfscale.tensor_parallel.layouts.layout_search import plan_layouts
from tfscale.tensor_parallel.layouts.layouts import AXIS


class FoundLayout(keras.distribution.TensorLayout):
    """Of `auto_layout_map`: a gathered output is worth no warning."""

    is_found = True


def auto_layout_map(
    model: keras.Model | Callable[[], keras.Model],
    mesh: keras.distribution.DeviceMesh,
) -> keras.distribution.LayoutMap:
    """Chooses which weights of a model to divide over the model axis.

    * Attention is divided by heads: of the layers under one parent, those that
      project to `(heads, head_dim)`, and the one that projects from there.
      Key and value heads that the axis does not divide, as when there are
      fewer than ranks, are replicated.
    * MLPs are divided by hidden units: a `Dense` followed by a `Dense`, with
      nothing but elementwise layers in between, in a Sequential or functional
      model (pairs with most weights first); in a layer with a `call` of its
      own, the `Dense` sublayers from `d` to `m` units and the one from `m`
      units that is next to them in the order of attributes, `m` not `d`.
    * Embeddings are divided by rows, unless "position", "segment" or
      "token_type" is in their name, and the last `Dense` of the model is
      divided by units if it has as many as such an embedding has rows.
    * Experts of a Mixture of Experts, weights of a layer of the shapes
      `(experts, width, hidden)` and `(experts, hidden, width)`, are divided by
      experts. A layer that Keras does not know puts them together where it
      uses them, so that they are kept in parts and not computed in parts.

    An `EinsumDense` counts as what its equation makes it. All else is
    replicated: whatever is not in a pair, what an axis of this size does not
    divide (a warning lists these), convolutions, quantized layers. No choice
    changes what the model computes, only who computes it. Where a model does
    with heads or units what it cannot do with a part of them, they are put
    together, which `tfscale.sharding_summary` shows.

    Only paths and shapes are read, so that the model may be one that is built
    for this purpose, outside of a strategy: best by the function that builds
    the one to train, which leaves Keras' automatic names and random states as
    they were. Of a model that is given, paths are those that the next one has
    if its layers have names of your own; else call
    `keras.utils.clear_session()` before the next one is built, lest Keras call
    a second "dense" "dense_1".

    Sources: Shoeybi et al. 2019, "Megatron-LM", section 3, for attention, MLPs
    and embeddings; Ainslie et al. 2023, "GQA", for fewer key and value heads.

    Args:
        model: A function of no arguments that builds a model, or a built
            model: Sequential, functional, nested or subclassed, a backbone or
            a task of keras_hub.
        mesh: The mesh to train on.

    Returns:
        A `keras.distribution.LayoutMap` with one key per sharded variable, its
        path as a regular expression, in the order of `model.variables`.
        Change it as you like.

    Raises:
        TypeError: If `model` is neither a `keras.Model` nor a function that
            returns one, or `mesh` is no `DeviceMesh`.
        ValueError: If the mesh has no axis `"model"`, the model is not built,
            or nothing in it can be sharded.

    Example:

    >>> import keras
    >>> import tfscale
    >>> tfscale.use_virtual_devices(8)
    >>> def build_model():
    ...     return keras.Sequential([
    ...         keras.Input((8,)),
    ...         keras.layers.Dense(32, activation="relu", name="up"),
    ...         keras.layers.Dense(8, name="down"),
    ...     ], name="mlp")
    >>> mesh = tfscale.device_mesh(model=2)
    >>> layout_map = auto_layout_map(build_model, mesh)
    >>> for pattern, layout in layout_map.items():
    ...     print(pattern, layout.axes)
    ^mlp/up/kernel$ (None, 'model')
    ^mlp/up/bias$ ('model',)
    ^mlp/down/kernel$ ('model', None)
    >>> with tfscale.MeshStrategy(mesh, layout_map).scope():
    ...     model = build_model()
    """
    if callable(model) and not isinstance(model, keras.Layer):
        model = _build_without_values(model)
    size = _check(model, mesh)
    plan = LayoutPlan(size)
    plan_layouts(model, plan)
    layout_map = keras.distribution.LayoutMap(mesh)
    for path, axes in plan.layouts(model).items():
        layout_map[f"^{re.escape(path)}$"] = FoundLayout(axes)
    if not layout_map:
        why = plan.why() or "no attention, MLP or embedding was found in it"
        raise ValueError(
            "A model must have weights that the model axis can shard. "
            f"Received: model {model.name!r} and a model axis of size {size}, "
            f"but {why}. Write a `keras.distribution.LayoutMap` yourself, or "
            "use the 'data' and 'pipeline' axes."
        )
    if plan.notes:
        warnings.warn(
            f"Replicated on the {size} ranks of the model axis: {plan.why()}.",
            stacklevel=2,
        )
    return layout_map


def _check(model, mesh):
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a `keras.Model`, or a function that returns one. "
            f"Received: {model!r}."
        )
    if not isinstance(mesh, keras.distribution.DeviceMesh):
        raise TypeError(
            "`mesh` must be a `keras.distribution.DeviceMesh`. Received: "
            f"{mesh!r}. Make one with `tfscale.device_mesh(model=...)`."
        )
    if AXIS not in mesh.axis_names:
        raise ValueError(
            f"`mesh` must have the axis {AXIS!r}. Received: the axes "
            f"{list(mesh.axis_names)}. Make one with "
            "`tfscale.device_mesh(model=...)`."
        )
    if not model.built or not model.variables:
        raise ValueError(
            "A model must be built before its weights can be laid out. "
            f"Received: {model.name!r}, which has no weights yet. Call it on a "
            "batch, or `model.build(input_shape)`."
        )
    return mesh.shape[mesh.axis_names.index(AXIS)]


def _build_without_values(build):
    """A model whose variables have no values, if it can be built so.

    The values of a large model might not fit into the host's memory.
    """

    def run():
        with keras.StatelessScope(initialize_variables=False):
            return build()

    try:
        return build_aside(run)
    except Exception:  # A function that loads weights, say, needs values.
        return build_aside(build)


def build_aside(build: Callable[[], keras.Model]) -> keras.Model:
    """Calls a function that builds a model, on the host and in no scope.

    The next model has the names and initial weights that it would have had: the
    numbers of Keras' automatic names, and the random states of Python and
    NumPy, from which Keras draws seeds, are as before.
    """
    names = attributes.automatic_names()
    policy = keras.config.dtype_policy()

    def run():
        # Strategies, scopes and names of Keras are those of a thread.
        keras.config.set_dtype_policy(policy)
        attributes.automatic_names().update(names)
        with keras.device("cpu:0"):
            return build()

    states = random.getstate(), np.random.get_state()
    try:
        return outside_scopes(run)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
