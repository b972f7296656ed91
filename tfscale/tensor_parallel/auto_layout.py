"""A layout map for a model that nobody wrote one for, from types and shapes."""

import collections
import math
import re
import warnings
from collections.abc import Callable

import keras

from tfscale import _internals
from tfscale.tensor_parallel.built_aside import built_aside
from tfscale.tensor_parallel.chains import Chains
from tfscale.tensor_parallel.chains import functional_of
from tfscale.tensor_parallel.found_layout import FoundLayout
from tfscale.tensor_parallel.projections import projection_of

_AXIS = "model"

_INTO_HEADS = re.compile("query|key|value", re.IGNORECASE)
_NOT_A_VOCABULARY = re.compile("position|segment|token_type", re.IGNORECASE)


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
        A `keras.distribution.LayoutMap` with one key per divided variable, its
        path as a regular expression, in the order of `model.variables`.
        Change it as you like.

    Raises:
        TypeError: If `model` is neither a `keras.Model` nor a function that
            returns one, or `mesh` is no `DeviceMesh`.
        ValueError: If the mesh has no axis `"model"`, the model is not built,
            or nothing in it can be divided.

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
        model = built_aside(model)
    size = _check(model, mesh)
    plan = _Plan(size)
    _visit(model, plan, set())
    _divide_head(plan)
    layout_map = keras.distribution.LayoutMap(mesh)
    for path, axes in plan.layouts(model).items():
        layout_map[f"^{re.escape(path)}$"] = FoundLayout(axes)
    if not layout_map:
        why = plan.why() or "no attention, MLP or embedding was found in it"
        raise ValueError(
            "A model must have something that can be divided over the model "
            f"axis. Received: model {model.name!r} and a model axis of size "
            f"{size}, but {why}. Write a `keras.distribution.LayoutMap` "
            "yourself, or use the 'data' and 'pipeline' axes."
        )
    if plan.notes:
        warnings.warn(
            f"Replicated on the {size} ranks of the model axis: {plan.why()}.",
            stacklevel=2,
        )
    return layout_map


class _Plan:
    """What has been decided so far."""

    def __init__(self, size):
        self.size = size
        self.notes = {}
        self.embedding_rows = set()
        self.last_matrix = None
        self._axes = {}

    def is_free(self, projection):
        return id(projection.kernel) not in self._axes

    def divides(self, length, what):
        if length % self.size == 0:
            return True
        larger = length + -length % self.size
        self.notes[what] = (
            f"the {length} {what}, which {self.size} does not divide "
            f"({larger} would do)"
        )
        return False

    def split(self, variable, dim):
        if variable is not None and dim is not None:
            axes = [None] * len(variable.shape)
            axes[dim] = _AXIS
            self._axes[id(variable)] = tuple(axes)

    def split_columns(self, projection):
        self.split(projection.kernel, projection.outputs[0])
        self.split(projection.bias, projection.bias_dim)

    def split_rows(self, projection):
        self.split(projection.kernel, projection.inputs[0])

    def why(self):
        return "; ".join(self.notes.values())

    def layouts(self, model):
        """Axes by path, without paths whose variables would need several."""
        found = collections.defaultdict(set)
        for variable in model.variables:
            found[variable.path].add(self._axes.get(id(variable)))
        for path, axes in found.items():
            if len(axes) > 1:
                self.notes[path] = f"{path}, the path of several variables"
        return {
            path: axes
            for path, (axes, *others) in found.items()
            if axes is not None and not others
        }


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
    if _AXIS not in mesh.axis_names:
        raise ValueError(
            f"`mesh` must have the axis {_AXIS!r}. Received: the axes "
            f"{list(mesh.axis_names)}. Make one with "
            "`tfscale.device_mesh(model=...)`."
        )
    if not model.built or not model.variables:
        raise ValueError(
            "A model must be built before its weights can be laid out. "
            f"Received: {model.name!r}, which has no weights yet. Call it on a "
            "batch, or `model.build(input_shape)`."
        )
    return mesh.shape[mesh.axis_names.index(_AXIS)]


def _visit(layer, plan, seen):
    """Decides on all that is in a layer, from the outside to the inside."""
    if id(layer) in seen:
        return
    seen.add(id(layer))
    sublayers = _internals.sublayers(layer)
    projections = [p for p in map(projection_of, sublayers) if p is not None]
    _divide_heads(projections, plan)
    graph = functional_of(layer)
    if graph is None:
        _divide_flat_heads(layer, projections, plan)
        _divide_experts(layer, plan)
        _divide_siblings(projections, plan)
    else:
        _divide_chains(graph, plan)
    matrices = {id(p.layer): p for p in projections if p.is_matrix}
    for sublayer in sublayers:
        if isinstance(sublayer, keras.layers.Embedding):
            _divide_embedding(sublayer, plan)
        plan.last_matrix = matrices.get(id(sublayer), plan.last_matrix)
        _visit(sublayer, plan, seen)


def _divide_heads(projections, plan):
    """By the heads, first of `(heads, head_dim)` in outputs and in inputs."""
    into = [
        (p, p.kernel.shape[p.outputs[0]])
        for p in projections
        if len(p.outputs) == 2
    ]
    out_of = [
        (p, p.kernel.shape[p.inputs[0]])
        for p in projections
        if len(p.inputs) == 2
    ]
    matrices = [p for p in projections if p.is_matrix]
    if into and not out_of and len(matrices) == 1:
        # Heads may be made one dim again before the projection from there.
        query, count = into[0]
        units = query.sizes[1]
        # A third of the units where queries, keys and values are made as one.
        if matrices[0].sizes[0] in (units, units / 3):
            out_of = [(matrices[0], count)]
    queries = {count for _, count in into} & {count for _, count in out_of}
    for p, count in out_of:
        if count in queries and plan.divides(count, f"heads of {_name(p)}"):
            plan.split_rows(p)
    for p, count in into:
        # Fewer heads than the queries have, that groups of these share, come
        # with them; their being replicated is worth no warning.
        if count % plan.size == 0 and any(n % count == 0 for n in queries):
            plan.split_columns(p)


def _divide_flat_heads(layer, projections, plan):
    """Heads that are one dim of the layers around them, as in T5."""
    count = getattr(layer, "num_heads", None)
    matrices = [p for p in projections if p.is_matrix]
    into = [p for p in matrices if _INTO_HEADS.search(p.layer.name)]
    out_of = [p for p in matrices if p not in into]
    if not isinstance(count, int) or len(into) != 3 or len(out_of) != 1:
        return
    width = {p.sizes[1] for p in into} | {out_of[0].sizes[0]}
    what = f"heads of {_name(out_of[0])}"
    if len(width) == 1 and plan.divides(count, what):
        for p in into:
            plan.split_columns(p)
        plan.split_rows(out_of[0])


def _divide_experts(layer, plan):
    """Weights of a layer itself, of which each expert has a matrix."""
    banks = [v for v in _internals.own_variables(layer) if len(v.shape) == 3]
    experts = [
        v
        for v in banks
        for other in banks
        if v is not other
        and (_are_mlps(v.shape, other.shape) or _are_mlps(other.shape, v.shape))
    ]
    if experts and plan.divides(
        experts[0].shape[0], f"experts of {experts[0].path}"
    ):
        for variable in experts:
            plan.split(variable, 0)


def _are_mlps(up, down):
    """Whether these are as many matrices to hidden units as back from there."""
    experts, width, hidden = up
    # Twice as many units where a gate and what it gates are made as one.
    return tuple(down) in (
        (experts, hidden, width),
        (experts, hidden / 2, width),
    )


def _divide_siblings(projections, plan):
    """MLPs of a parent whose call cannot be seen, by shapes and order."""
    run = []
    for p in projections:
        if not p.is_matrix or not plan.is_free(p):
            continue
        if run and p.sizes != run[0].sizes and p.sizes[0] == run[0].sizes[1]:
            _divide_pair(run, p, plan)
            run = []
            continue
        if run and p.sizes != run[0].sizes:
            run = []
        if p.sizes[0] != p.sizes[1] and p.is_elementwise:
            run.append(p)


def _divide_chains(graph, plan):
    """MLPs of a functional model, by what is computed from what."""
    chains = Chains(graph)
    for ups, down in sorted(chains.pairs(), key=_num_weights, reverse=True):
        _divide_pair(ups, down, plan)


def _num_weights(pair):
    ups, down = pair
    return sum(math.prod(p.kernel.shape) for p in [*ups, down])


def _divide_pair(ups, down, plan):
    if not all(map(plan.is_free, [*ups, down])):
        return
    if plan.divides(down.sizes[0], f"units of {_name(ups[0])}"):
        for up in ups:
            plan.split_columns(up)
        plan.split_rows(down)


def _divide_embedding(layer, plan):
    if _NOT_A_VOCABULARY.search(layer.name):
        return
    weights = {v.name: v for v in layer.weights}
    if not weights or layer.quantization_mode:
        return
    if plan.divides(layer.input_dim, f"rows of {layer.name}"):
        plan.embedding_rows.add(layer.input_dim)
        plan.split(weights.get("embeddings"), 0)
        plan.split(weights.get("reverse_embeddings"), 1)


def _divide_head(plan):
    p = plan.last_matrix
    if p and plan.is_free(p) and p.sizes[1] in plan.embedding_rows:
        plan.split_columns(p)


def _name(projection):
    return projection.kernel.path.removesuffix("/kernel")
