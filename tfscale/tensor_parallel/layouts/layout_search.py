"""Finds heads, hidden units, experts and vocabularies that can be sharded.

Only types, shapes, names and the order of layers are read; no choice changes
what the model computes.
"""

import collections
import math
import re
from typing import Any

import keras

from tfscale._internals import attributes
from tfscale.tensor_parallel.layouts.layouts import AXIS
from tfscale.tensor_parallel.layouts.projections import Projection
from tfscale.tensor_parallel.layouts.projections import dense_pairs
from tfscale.tensor_parallel.layouts.projections import projection_of


class LayoutPlan:
    """The layouts of one model, for an axis of some size, decided so far."""

    def __init__(self, size: int):
        self.size = size
        # Why something that could be sharded is replicated.
        self.notes: dict[str, str] = {}
        # Numbers of rows of the embeddings that are sharded.
        self.embedding_rows: set[int] = set()
        # The last projection from units to units.
        self.last_matrix: Projection | None = None
        self._axes: dict[int, tuple[str | None, ...]] = {}

    def is_free(self, projection: Projection) -> bool:
        """Whether a projection has no layout yet."""
        return id(projection.kernel) not in self._axes

    def divides(self, length: int, what: str) -> bool:
        """Whether the axis divides a dim; if not, a note says so."""
        if length % self.size == 0:
            return True
        larger = length + -length % self.size
        self.notes[what] = (
            f"the {length} {what}, which {self.size} does not divide "
            f"({larger} would do)"
        )
        return False

    def shard(self, variable: keras.Variable | None, dim: int | None) -> None:
        """Shards a variable, if there is one, on a dim."""
        if variable is not None and dim is not None:
            axes: list[str | None] = [None] * len(variable.shape)
            axes[dim] = AXIS
            self._axes[id(variable)] = tuple(axes)

    def shard_columns(self, projection: Projection) -> None:
        """Shards the outputs of a projection."""
        self.shard(projection.kernel, projection.outputs[0])
        self.shard(projection.bias, projection.bias_dim)

    def shard_rows(self, projection: Projection) -> None:
        """Shards the inputs of a projection."""
        self.shard(projection.kernel, projection.inputs[0])

    def why(self) -> str:
        """Why parts of the model are replicated."""
        return "; ".join(self.notes.values())

    def layouts(self, model: keras.Model) -> dict[str, tuple[str | None, ...]]:
        """Axes by path, without paths whose variables would need several."""
        found: dict[str, Any] = collections.defaultdict(set)
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


_INTO_HEADS = re.compile("query|key|value", re.IGNORECASE)
_NOT_A_VOCABULARY = re.compile("position|segment|token_type", re.IGNORECASE)


def plan_layouts(model: keras.Model, plan: LayoutPlan) -> None:
    """Decides on all layers of a model, from the outside to the inside."""
    _visit(model, plan, set())
    head = plan.last_matrix
    if head and plan.is_free(head) and head.sizes[1] in plan.embedding_rows:
        plan.shard_columns(head)


def _visit(layer, plan, seen):
    if id(layer) in seen:
        return
    seen.add(id(layer))
    sublayers = attributes.sublayers(layer)
    projections = [p for p in map(projection_of, sublayers) if p is not None]
    _shard_heads(projections, plan)
    graph = attributes.functional_of(layer)
    if graph is None:
        _shard_flat_heads(layer, projections, plan)
        _shard_experts(layer, plan)
        _shard_siblings(projections, plan)
    else:
        # The pairs with most weights first.
        pairs = sorted(dense_pairs(graph), key=_num_weights, reverse=True)
        for ups, down in pairs:
            _shard_pair(ups, down, plan)
    matrices = {id(p.layer): p for p in projections if p.is_matrix}
    for sublayer in sublayers:
        if isinstance(sublayer, keras.layers.Embedding):
            _shard_embedding(sublayer, plan)
        plan.last_matrix = matrices.get(id(sublayer), plan.last_matrix)
        _visit(sublayer, plan, seen)


def _shard_heads(projections, plan):
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
        # Heads may be merged into one dim before the output projection.
        query, count = into[0]
        units = query.sizes[1]
        # A third of the units if one layer computes queries, keys and values.
        if matrices[0].sizes[0] in (units, units / 3):
            out_of = [(matrices[0], count)]
    queries = {count for _, count in into} & {count for _, count in out_of}
    for p, count in out_of:
        if count in queries and plan.divides(count, f"heads of {_name(p)}"):
            plan.shard_rows(p)
    for p, count in into:
        # Key and value heads that groups of query heads share; replicating them
        # is worth no warning.
        if count % plan.size == 0 and any(n % count == 0 for n in queries):
            plan.shard_columns(p)


def _shard_flat_heads(layer, projections, plan):
    """Heads merged into one dim of the layers around them, as in T5."""
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
            plan.shard_columns(p)
        plan.shard_rows(out_of[0])


def _shard_experts(layer, plan):
    """Weights of a layer itself with a matrix for each expert."""
    banks = [v for v in attributes.direct_variables(layer) if len(v.shape) == 3]
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
            plan.shard(variable, 0)


def _are_mlps(up, down):
    """Whether there are as many matrices to hidden units as back."""
    experts, width, hidden = up
    # Twice as many units if the first matrix contains the gate.
    return tuple(down) in (
        (experts, hidden, width),
        (experts, hidden / 2, width),
    )


def _shard_siblings(projections, plan):
    """MLPs of a parent whose call cannot be seen, by shapes and order."""
    run = []
    for p in projections:
        if not p.is_matrix or not plan.is_free(p):
            continue
        if run and p.sizes != run[0].sizes and p.sizes[0] == run[0].sizes[1]:
            _shard_pair(run, p, plan)
            run = []
            continue
        if run and p.sizes != run[0].sizes:
            run = []
        if p.sizes[0] != p.sizes[1] and p.is_elementwise:
            run.append(p)


def _num_weights(pair):
    ups, down = pair
    return sum(math.prod(p.kernel.shape) for p in [*ups, down])


def _shard_pair(ups, down, plan):
    if not all(map(plan.is_free, [*ups, down])):
        return
    if plan.divides(down.sizes[0], f"units of {_name(ups[0])}"):
        for up in ups:
            plan.shard_columns(up)
        plan.shard_rows(down)


def _shard_embedding(layer, plan):
    if _NOT_A_VOCABULARY.search(layer.name):
        return
    weights = {v.name: v for v in layer.weights}
    if not weights or layer.quantization_mode:
        return
    if plan.divides(layer.input_dim, f"rows of {layer.name}"):
        plan.embedding_rows.add(layer.input_dim)
        plan.shard(weights.get("embeddings"), 0)
        plan.shard(weights.get("reverse_embeddings"), 1)


def _name(projection):
    return projection.kernel.path.removesuffix("/kernel")
