"""From a layout map to the dim of each variable that the model axis divides."""

import difflib
import re
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

AXIS = "model"
DATA_AXIS = "data"


def _check_map(layout_map: Any) -> None:
    if layout_map is None or isinstance(layout_map, Mapping):
        return
    what = "Pass one, or a dict of tuples, or None."
    if hasattr(layout_map, "device_mesh"):  # one of `keras.distribution`
        what = (
            "A distribution of Keras holds a mesh and a map: pass the map that "
            "it was made with; which axis is which is a matter of names here."
        )
    raise TypeError(
        "`layout_map` must be a `keras.distribution.LayoutMap`. Received: "
        f"{layout_map!r}. {what}"
    )


def _axes_of(
    pattern: str, layout: Any, sizes: Mapping[str, int]
) -> tuple[str | None, ...]:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            "The keys of a layout map must be regular expressions. Received: "
            f"{pattern!r}: {error}. Use '.*' to match any text."
        ) from error
    axes = getattr(layout, "axes", layout)
    if not isinstance(axes, (tuple, list)):
        raise TypeError(
            "A layout must be a `keras.distribution.TensorLayout` or a tuple "
            f"with one entry per dim. Received: {layout!r} for {pattern!r}."
        )
    axes = tuple(axes)
    # A variable is on one stage, never spread over several.
    known = [None, *(name for name in sizes if name != "pipeline")]
    for axis in axes:
        if axis not in known:
            raise ValueError(
                "A layout must have one axis of the mesh, or None, for each "
                "dim, and not 'pipeline', which spreads layers. Received: "
                f"{axis!r} in {axes} for {pattern!r}, where the mesh has the "
                f"axes {', '.join(map(repr, sizes))}. Rename it, or give each "
                "axis another dim; `get_layout_map` of keras_hub takes the "
                "names as `model_parallel_dim_name` and "
                "`data_parallel_dim_name`."
            )
    for name in (AXIS, DATA_AXIS):
        if axes.count(name) > 1:
            raise ValueError(
                f"A layout must name the axis {name!r} at most once. Received: "
                f"{axes} for {pattern!r}. Put `None` in all places but one."
            )
    return axes


_NUMBER = re.compile(r"_\d+(?=/|$)")
# Patterns without a match; a model that was built twice has dozens.
_MAX_TOLD = 3
_NO_PATHS = (
    " No layer has made a variable yet: a model with a `call` of its own must "
    "not be left to `fit` to build. Call it on a batch in the scope first."
)


class Layouts:
    """The dim of each variable that is sharded over the `"model"` axis.

    Reads a `keras.distribution.LayoutMap`, or a mapping from patterns to tuples
    of axes, as Keras does: a key that is the path of a variable decides;
    otherwise the one key that matches the whole path (`re.fullmatch`). Only the
    axis `"model"` shards a variable, and `"data"` where `replicas_divide`
    weights (ZeRO stage 3); see `ignored`. The map's own mesh does not count.
    With a map of None layers decide what they divide.

    Attributes:
        size: Number of ranks that a variable is sharded over.
    """

    def __init__(
        self,
        layout_map: Mapping[str, Any] | None,
        mesh,
        replicas_divide: bool = False,
    ):
        _check_map(layout_map)
        sizes = dict(zip(mesh.axis_names, mesh.shape))
        self.size = sizes.get(AXIS, 1)
        self._divides_something = self.size == 1
        self._axes = {}
        self._given = None if layout_map is None else self._axes
        self._found = set()
        self._matched = set()
        self._ignored = {}
        self._num_replicas = sizes.get(DATA_AXIS, 1) if replicas_divide else 1
        if sizes.get(AXIS) == 1 and not replicas_divide:
            return
        for pattern, layout in (layout_map or {}).items():
            self._axes[pattern] = _axes_of(pattern, layout, sizes)
            if getattr(layout, "is_found", False):
                self._found.add(pattern)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Paths of variables that are whole where a layout names `"data"`.

        `keras.distribution` on JAX would shard them over the replicas.
        """
        return tuple(self._ignored)

    def is_found(self, path: str) -> bool:
        """Whether a variable is sharded because `auto_layout_map` says so."""
        return self._pattern_for(path) in self._found

    def split_dim(
        self, path: str, shape: tuple[int, ...], declared: int | None = None
    ) -> int | None:
        """The dim of a variable that is sharded, or None.

        `declared` is the one that a layer of `tfscale.layers` divides.
        """
        pattern = self._pattern_for(path)
        if pattern is None:
            if declared is not None:
                dims = range(len(shape))
                asked = tuple(AXIS if d == declared else None for d in dims)
                self._check_divisible(path, shape, declared, asked)
                self._divides_something = True
            return declared
        self._matched.add(pattern)
        axes = self._axes[pattern]
        if len(axes) != len(shape):
            raise ValueError(
                "A layout must have one entry per dim of its variable. "
                f"Received: {axes} (of {pattern!r}), with {len(axes)}, for "
                f"{path!r} of shape {tuple(shape)}, with {len(shape)}. Add or "
                "remove `None`s, or make the pattern narrower."
            )
        if DATA_AXIS in axes and self._num_replicas == 1:
            self._ignored[path] = axes
        dim = axes.index(AXIS) if AXIS in axes and self.size > 1 else None
        if declared not in (None, dim):
            raise ValueError(
                "A layout map must agree with the layers of `tfscale.layers`, "
                f"which shard their own variables. Received: {axes} (of "
                f"{pattern!r}) for {path!r}, which is sharded along dim "
                f"{declared}. Make the pattern narrower, or use Keras' layer."
            )
        if dim is not None:
            self._check_divisible(path, shape, dim, axes)
            self._divides_something = True
        return dim

    def data_dim(self, path: str, shape: tuple[int, ...]) -> int | None:
        """The dim of a weight that its layout has the replicas divide."""
        axes = self._axes.get(self._pattern_for(path), ())
        if DATA_AXIS not in axes or self._num_replicas == 1:
            return None
        dim = axes.index(DATA_AXIS)
        if shape[dim] % self._num_replicas:
            raise ValueError(
                "The data axis must divide the dim that is split over it. "
                f"Received: {path!r} of shape {tuple(shape)} with the layout "
                f"{axes}: dim {dim} has size {shape[dim]}, the axis "
                f"{DATA_AXIS!r} has size {self._num_replicas}. Name another "
                "dim, or none to have one chosen."
            )
        return dim

    def unmatched(self) -> list[str]:
        """Patterns that have matched no variable so far, in their order."""
        return [p for p in self._axes if p not in self._matched]

    def check_all_matched(self, variables: Iterable) -> None:
        """Raises if a pattern has no match, or nothing is sharded at all."""
        unmatched = self.unmatched()
        paths = [getattr(v, "path", v) for v in variables]
        if not unmatched:
            # Without variables there is nothing to train.
            if paths:
                self._check_divides_something()
            return
        told, others = unmatched[:_MAX_TOLD], unmatched[_MAX_TOLD:]
        lines = [f"  {p!r}{_hint(p, paths)}" for p in told]
        if others:
            lines.append(f"  and {len(others)} more")
        raise ValueError(
            "Every pattern of a layout map must match the whole path of a "
            "variable (`re.fullmatch`). Received patterns that match none:\n"
            + "\n".join(lines)
            + "\nCorrect them or leave them out; `variable.path` is what they "
            "are matched with." + ("" if paths else _NO_PATHS)
        )

    def _check_divides_something(self):
        if self._divides_something:
            return
        raise ValueError(
            f"Something must be sharded over a {AXIS!r} axis; otherwise each "
            "of its ranks trains the whole model. Received: an axis of size "
            f"{self.size}, layout_map={self._given}, and no layer of "
            "`tfscale.layers` made in the scope of the strategy. Pass a "
            "`keras.distribution.LayoutMap`, for example from "
            "`tfscale.auto_layout_map`."
        )

    def _pattern_for(self, path):
        if path in self._axes:
            return path
        matches = [p for p in self._axes if re.fullmatch(p, path)]
        if len(matches) > 1:
            raise ValueError(
                "A variable must match at most one pattern of a layout map. "
                f"Received: {path!r}, which matches "
                f"{', '.join(map(repr, matches))}. Make them narrower, or add "
                f"the key {path!r}, which takes precedence."
            )
        return matches[0] if matches else None

    def _check_divisible(self, path, shape, dim, axes):
        length, size = shape[dim], self.size
        if length % size == 0:
            return
        divisors = [n for n in range(1, length + 1) if length % n == 0]
        raise ValueError(
            "The model axis must divide the dim that is split over it. "
            f"Received: {path!r} of shape {tuple(shape)} with the layout "
            f"{axes}: dim {dim} has size {length}, the axis {AXIS!r} has size "
            f"{size}. Use a model axis of {', '.join(map(str, divisors))}, or "
            f"a dim of {length + -length % size}. In place of a layout of your "
            "own use `tfscale.auto_layout_map`, or keep the variable whole, by "
            f"the key {path!r} with `None`s, which takes precedence."
        )


def _hint(pattern: str, paths: Sequence[str]) -> str:
    whole = [p for p in paths if re.fullmatch(pattern, p)]
    if whole:
        return (
            f" (it matches {whole[0]!r}, which was not made under the "
            "strategy, or has a key of its own)"
        )
    inside = [p for p in paths if re.search(pattern, p)]
    if inside:
        return (
            f" (it matches only a part of {inside[0]!r}; begin or end it with "
            "'.*')"
        )
    plain = re.sub(r"\.\*|\.\+|[\\^$()\[\]?]", "", pattern)
    numbered = [
        p for p in paths if _NUMBER.sub("", p) == _NUMBER.sub("", plain)
    ]
    if numbered:
        return (
            f" (it matches {numbered[0]!r} but for a number, which Keras gives "
            "layers of one name in the order in which they are made: name them "
            "yourself, pass the function that builds the model to "
            "`tfscale.auto_layout_map`, or call `keras.utils.clear_session()` "
            "before the model is built)"
        )
    near = difflib.get_close_matches(plain, paths, n=3, cutoff=0.0)
    return f" (nearest: {', '.join(map(repr, near))})" if near else ""
