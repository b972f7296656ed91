"""A profile as a table, and as timelines."""

from collections.abc import Mapping
from typing import NamedTuple

import rich.table

from tfscale.formatting import as_text
from tfscale.profiling.breakdown import Recording
from tfscale.profiling.breakdown import Shares
from tfscale.profiling.layer_times import is_backward
from tfscale.schedules.simulate import Span

_WIDTH = 200  # tables are as wide as their cells
_LAYERS = 10
_PICOSECONDS = 1e-12


def as_table(
    found: Mapping[str, Shares],
    layers: Mapping[str, tuple[float, float]],
    head: str,
) -> str:
    """The shares of devices, and the ten dearest layers.

    Args:
        found: Shares by device.
        layers: Seconds of forward and backward, dearest first.
        head: The first line.
    """
    axes = sorted({axis for each in found.values() for axis in each[1]})
    devices = rich.table.Table()
    for title in ("device", "compute", *axes, "both", "overlap"):
        devices.add_column(title, no_wrap=True)
    for title in ("idle", "input", "bubble"):
        devices.add_column(title, no_wrap=True)
    for device, each in found.items():
        overlap = "-" if each.overlap is None else f"{each.overlap:.1%}"
        devices.add_row(
            device,
            f"{each.compute:.1%}",
            *(f"{each.communication.get(axis, 0):.1%}" for axis in axes),
            f"{each.both:.1%}",
            overlap,
            f"{each.idle:.1%}",
            f"{each.input_wait:.1%}",
            f"{each.bubble:.1%}",
        )
    times = rich.table.Table()
    for title in ("layer", "forward, ms", "backward, ms"):
        times.add_column(title)
    for name, pair in list(layers.items())[:_LAYERS]:
        times.add_row(name, *(f"{1e3 * t:.3f}" for t in pair))
    tables = [devices, times] if layers else [devices]
    return f"{head}\n{as_text(*tables, width=_WIDTH)}".rstrip()


class _Operation(NamedTuple):
    """An action, as far as `as_chrome_trace` needs one."""

    kind: str
    name: str

    def __str__(self):
        return self.name


def timelines(recording: Recording) -> dict[str, list[Span]]:
    """Title to spans, in seconds, for `tfscale.schedules.as_chrome_trace`.

    A device is a title: what it computes is thread 0, what it sends thread 1.
    """
    found: dict[str, list[Span]] = {}
    for device, begin, end, name, axis in recording.events:
        kind = "B" if is_backward(name) else "F"
        if axis is not None:
            kind, name = "C", f"{axis}: {name}"
        operation: object = _Operation(kind, name)
        found.setdefault(device, []).append(
            Span(
                operation,  # type: ignore[arg-type]
                int(axis is not None),
                begin * _PICOSECONDS,
                end * _PICOSECONDS,
            )
        )
    return dict(sorted(found.items()))
