"""Which variables of a model are sharded on which dim, as it is decided."""

import collections
from typing import Any

import keras

from tfscale.tensor_parallel.layouts.projections import Projection

AXIS = "model"


class LayoutPlan:
    """What has been decided so far, of the variables of one model.

    Args:
        size: That of the model axis.

    Attributes:
        size: Size of the model axis.
        notes: Dict from what could be sharded, but is replicated, to why.
        embedding_rows: Of the embeddings that are sharded.
        last_matrix: The last projection from units to units, or None.
    """

    def __init__(self, size: int):
        self.size = size
        self.notes: dict[str, str] = {}
        self.embedding_rows: set[int] = set()
        self.last_matrix: Projection | None = None
        self._axes: dict[int, tuple[str | None, ...]] = {}

    def is_free(self, projection: Projection) -> bool:
        """Whether nothing was decided of a projection."""
        return id(projection.kernel) not in self._axes

    def divides(self, length: int, what: str) -> bool:
        """Whether the axis divides a dim; if not, it is noted."""
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
        """Shards what a projection gives."""
        self.shard(projection.kernel, projection.outputs[0])
        self.shard(projection.bias, projection.bias_dim)

    def shard_rows(self, projection: Projection) -> None:
        """Shards what a projection takes."""
        self.shard(projection.kernel, projection.inputs[0])

    def why(self) -> str:
        """Why what could be sharded is replicated."""
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
