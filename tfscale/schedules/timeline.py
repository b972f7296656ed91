"""Draws spans, one timeline above the other, at one scale and from time 0.

As text for a terminal, as a PNG, and for Perfetto (https://ui.perfetto.dev).
"""

from collections.abc import Iterable
from collections.abc import Mapping

from tfscale.formatting import new_figure
from tfscale.schedules.simulate import Span

KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "W": "weight gradients",
    "U": "update",
    "C": "communication",  # of a profile
}
_COLORS = {"F": "#3b6fa5", "B": "#f3b04b", "W": "#8fbf88", "U": "#b5523b"}
_TEXT_COLORS = {"F": "white", "B": "#3d2b00", "W": "#17330f", "U": "white"}
_IDLE_COLOR = "#eeeeee"


def as_text(
    timelines: Mapping[str, Iterable[Span]], width: int = 100, unit: str = "s"
) -> str:
    """A staircase per timeline: one line per device, time to the right.

    An action begins with its name and lasts to the end of its dashes. Where
    each device has one stage, `F3` stands for microbatch 3; else `F1.3` for
    stage 1, microbatch 3.

    Args:
        timelines: Title to spans.
        width: Most columns of the time axis. An action that is too short for
            its name at that width has the letter of its kind only.
        unit: Unit of time to print.

    Raises:
        ValueError: If there is nothing to draw.

    Example:

    >>> from tfscale.schedules.named_schedules import one_f_one_b
    >>> from tfscale.schedules.simulate import simulate
    >>> spans = simulate(one_f_one_b(2, 3)).spans
    >>> print(as_text({"1f1b": spans}))
    1f1b: 12 s, idle 25.0 %
      device 0  F0 F1       B0--- F2 B1---    B2---
      device 1     F0 B0--- F1 B1--- F2 B2---
    """
    timelines = _from_zero(timelines)
    end = max(_end(spans) for spans in timelines.values())
    names = {title: _names(spans) for title, spans in timelines.items()}
    # The shortest action decides the scale, if there is room for that.
    needed = [
        (len(name) + 1) / (span.end - span.start)
        for title, spans in timelines.items()
        for span, name in zip(spans, names[title], strict=True)
        if span.end > span.start
    ]
    scale = min(width / end, max(needed))
    lines = []
    for title, spans in timelines.items():
        lines.append(_headline(title, spans, unit))
        rows = {d: [" "] * (round(end * scale) + 1) for d in _devices(spans)}
        for span, name in zip(spans, names[title], strict=True):
            start, stop = round(span.start * scale), round(span.end * scale)
            # A blank at the end keeps neighbors apart.
            stop = max(stop - 1, start + 1)
            label = name if len(name) <= stop - start else name[0]
            rows[span.device][start:stop] = label.ljust(stop - start, "-")
        for device, row in rows.items():
            lines.append(f"  device {device}  {''.join(row)}".rstrip())
    return "\n".join(lines)


def as_chrome_trace(timelines: Mapping[str, Iterable[Span]]) -> dict:
    """The timelines as a trace that Perfetto and `chrome://tracing` open.

    Each timeline is a process, each device a thread of it; the kind, stage
    and microbatch of an action are its arguments. Spans are in seconds.

    Args:
        timelines: Title to spans.

    Returns:
        A dict in the trace event format; write it with `json.dump`.

    Raises:
        ValueError: If there is nothing to draw.

    Example:

    >>> from tfscale.schedules.named_schedules import gpipe
    >>> from tfscale.schedules.simulate import simulate
    >>> trace = as_chrome_trace({"gpipe": simulate(gpipe(1, 1)).spans})
    >>> [e["name"] for e in trace["traceEvents"] if e["ph"] == "X"]
    ['F0.0', 'B0.0']
    """
    events = []

    def describe(key, pid, tid, **args):
        events.append(
            {"ph": "M", "name": key, "pid": pid, "tid": tid, "args": args}
        )

    for pid, (title, spans) in enumerate(_from_zero(timelines).items()):
        describe("process_name", pid, 0, name=title)
        describe("process_sort_index", pid, 0, sort_index=pid)
        for device in _devices(spans):
            describe("thread_name", pid, device, name=f"device {device}")
            describe("thread_sort_index", pid, device, sort_index=device)
        for action, device, start, stop in spans:
            kind = KIND_NAMES[action.kind]
            events.append(
                {
                    "ph": "X",
                    "name": str(action),
                    "cat": kind,
                    "pid": pid,
                    "tid": device,
                    "ts": start * 1e6,
                    "dur": (stop - start) * 1e6,
                    "args": action._asdict() | {"kind": kind},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_png(
    timelines: Mapping[str, Iterable[Span]], path: str, unit: str = "s"
) -> None:
    """Draws the timelines one above the other at one scale.

    Args:
        timelines: Title to spans.
        path: Where to write the PNG.
        unit: Unit of time to print.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there is nothing to draw.

    Example:

    >>> import os
    >>> import tempfile
    >>> from tfscale.schedules.named_schedules import gpipe
    >>> from tfscale.schedules.simulate import simulate
    >>> path = os.path.join(tempfile.mkdtemp(), "gpipe.png")
    >>> save_png({"gpipe": simulate(gpipe(2, 4)).spans}, path)
    """
    timelines = _from_zero(timelines)
    end = max(_end(spans) for spans in timelines.values())
    rows = [len(_devices(spans)) for spans in timelines.values()]
    figure = new_figure(
        "use `as_text` or `as_chrome_trace`, which need nothing",
        figsize=(12, 0.9 + sum(0.75 + 0.42 * n for n in rows)),
    )
    from matplotlib.patches import Patch

    all_axes = figure.subplots(
        len(rows), sharex=True, squeeze=False, height_ratios=rows
    )[:, 0]
    for axes, (title, spans) in zip(all_axes, timelines.items(), strict=True):
        _draw(axes, spans, end)
        axes.set_title(_headline(title, spans, unit), loc="left", weight="bold")
    axes.set_xlabel(f"time ({unit})")
    kinds = {s.action.kind for spans in timelines.values() for s in spans}
    figure.legend(
        handles=[
            Patch(color=_COLORS[kind], label=name)
            for kind, name in KIND_NAMES.items()
            if kind in kinds
        ]
        + [Patch(color=_IDLE_COLOR, label="idle")],
        loc="outside lower right",
        ncols=4,
        frameon=False,
    )
    figure.savefig(path, dpi=150)


def _draw(axes, spans, end):
    devices = _devices(spans)
    axes.barh(range(len(devices)), _end(spans), 0.82, color=_IDLE_COLOR)
    lengths = [span.end - span.start for span in spans]
    bars = axes.barh(
        [devices.index(span.device) for span in spans],
        lengths,
        left=[span.start for span in spans],
        height=0.82,
        color=[_COLORS[span.action.kind] for span in spans],
        edgecolor="white",
        linewidth=0.8,
    )
    # The color says the kind. 12 inches hold some 150 characters.
    labels = [
        name[1:] if length / end * 150 > len(name) - 0.5 else ""
        for name, length in zip(_names(spans), lengths, strict=True)
    ]
    texts = axes.bar_label(bars, labels, label_type="center", fontsize=8)
    for text, span in zip(texts, spans, strict=True):
        text.set_color(_TEXT_COLORS[span.action.kind])
    axes.set_yticks(range(len(devices)), [f"device {d}" for d in devices])
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _from_zero(timelines) -> dict[str, list[Span]]:
    shifted = {}
    for title, spans in timelines.items():
        spans = sorted(spans, key=lambda span: (span.start, span.device))
        if not spans:
            raise ValueError(
                f"A timeline must have spans. Received: none for {title!r}."
            )
        zero = spans[0].start
        shifted[title] = [
            s._replace(start=s.start - zero, end=s.end - zero) for s in spans
        ]
    if not shifted:
        raise ValueError("There must be a timeline to draw. Received: none.")
    return shifted


def _devices(spans) -> list[int]:
    return sorted({span.device for span in spans})


def _end(spans) -> float:
    return max(span.end for span in spans)


def _names(spans) -> list[str]:
    """`F3` for microbatch 3 where each device has one stage, else `F1.3`."""
    rows = {(span.device, span.action.stage) for span in spans}
    if len(rows) > len(_devices(spans)):
        return [str(span.action) for span in spans]
    return [f"{s.action.kind}{s.action.microbatch}" for s in spans]


def _headline(title, spans, unit) -> str:
    busy = sum(span.end - span.start for span in spans)
    idle = 1 - busy / (len(_devices(spans)) * _end(spans))
    return f"{title}: {_end(spans):.4g} {unit}, idle {100 * idle:.1f} %"
