"""A layout map for a model that nobody wrote one for, from types and shapes."""

import collections
import math
import re
import warnings

import keras

from tfscale import _internals
from tfscale.tensor_parallel.chains import Chains
from tfscale.tensor_parallel.chains import functional_of
from tfscale.tensor_parallel.projections import projection_of

_AXIS = "model"

_NOT_A_VOCABULARY = re.compile("position|segment|token_type", re.IGNORECASE)


def auto_layout_map(
    model: keras.Model, mesh: keras.distribution.DeviceMesh
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

    An `EinsumDense` counts as what its equation makes it. All else is
    replicated: whatever is not in a pair, what an axis of this size does not
    divide (a warning lists these), convolutions, quantized layers. No choice
    changes what the model computes, only who computes it.

    Only paths and shapes are read, so that `model` may be built for this
    purpose, outside of a strategy. Paths are made of names: give layers names
    of your own, or call `keras.utils.clear_session()` before the model is
    built again, lest Keras call a second "dense" "dense_1".

    Sources: Shoeybi et al. 2019, "Megatron-LM", section 3, for attention, MLPs
    and embeddings; Ainslie et al. 2023, "GQA", for fewer key and value heads.

    Args:
        model: A built model: Sequential, functional, nested or subclassed, a
            backbone or a task of keras_hub.
        mesh: The mesh to train on.

    Returns:
        A `keras.distribution.LayoutMap` with one key per divided variable, its
        path as a regular expression, in the order of `model.variables`.
        Change it as you like.

    Raises:
        TypeError: If `model` is no `keras.Model`.
        ValueError: If the mesh has no axis `"model"`, the model is not built,
            or nothing in it can be divided.

    Example:

    >>> import keras
    >>> import tfscale
    >>> tfscale.use_virtual_devices(8)
    >>> mlp = keras.Sequential([
    ...     keras.Input((8,)),
    ...     keras.layers.Dense(32, activation="relu", name="up"),
    ...     keras.layers.Dense(8, name="down"),
    ... ], name="mlp")
    >>> layout_map = auto_layout_map(mlp, tfscale.device_mesh(model=2))
    >>> for pattern, layout in layout_map.items():
    ...     print(pattern, layout.axes)
    ^mlp/up/kernel$ (None, 'model')
    ^mlp/up/bias$ ('model',)
    ^mlp/down/kernel$ ('model', None)
    """
    size = _check(model, mesh)
    plan = _Plan(size)
    _visit(model, plan, set())
    _divide_head(plan)
    layout_map = keras.distribution.LayoutMap(mesh)
    for path, axes in plan.layouts(model).items():
        layout_map[f"^{re.escape(path)}$"] = axes
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
            f"`model` must be a `keras.Model`. Received: {model!r}."
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


def _divide_siblings(projections, plan):
    """MLPs of a parent whose call cannot be seen, by shapes and order."""
    run = []
    for p in projections:
        if not p.is_matrix:
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
