"""An entry of a layout map, checked: its pattern, its axes, the sharded dim."""

import re
from collections.abc import Mapping
from typing import Any

AXIS = "model"
DATA_AXIS = "data"


def check_map(layout_map: Any) -> None:
    """Raises if it is neither a map nor None."""
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


def check_pattern(pattern: str) -> None:
    """Raises if a key is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            "The keys of a layout map must be regular expressions. Received: "
            f"{pattern!r}: {error}. For any text write '.*'."
        ) from error


def axes_of(pattern: str, layout: Any) -> tuple[str | None, ...]:
    """The axes that a layout names, one entry per dim."""
    axes = getattr(layout, "axes", layout)
    if not isinstance(axes, (tuple, list)):
        raise TypeError(
            "A layout must be a `keras.distribution.TensorLayout` or a tuple "
            f"with one entry per dim. Received: {layout!r} for {pattern!r}."
        )
    return tuple(axes)


def split_dim_of(
    pattern: str, axes: tuple[str | None, ...], sizes: Mapping[str, int]
) -> int | None:
    """The dim that the model axis divides, or None if there is none.

    Args:
        pattern: The key of the layout, for what is said of it.
        axes: See `axes_of`.
        sizes: Of the mesh, by axis.
    """
    for axis in axes:
        if isinstance(axis, tuple | list):
            raise ValueError(
                "A layout must name axes of the mesh, one axis for a dim at "
                f"most. Received: {axis} in {axes} for {pattern!r}. Give each "
                "axis a dim of its own."
            )
        # An axis of the mesh, yet its layers are whole: a variable is on one
        # stage, never spread over several.
        if axis == "pipeline":
            raise ValueError(
                "A layout must not name the axis 'pipeline', along which "
                f"layers are spread and not their weights. Received: {axes} "
                f"for {pattern!r}. Use {AXIS!r}."
            )
        if axis is not None and axis not in sizes:
            raise ValueError(
                "A layout must name axes of the mesh. Received: "
                f"{axis!r} in {axes} for {pattern!r}, but the mesh has the "
                f"axes {', '.join(map(repr, sizes))}. Rename it; "
                "`get_layout_map` of keras_hub takes the names as "
                "`model_parallel_dim_name` and `data_parallel_dim_name`."
            )
    for name in (AXIS, DATA_AXIS):
        if axes.count(name) > 1:
            raise ValueError(
                f"A layout must name the axis {name!r} once at most. Received: "
                f"{axes} for {pattern!r}. Put `None` in all places but one."
            )
    return axes.index(AXIS) if AXIS in axes else None
