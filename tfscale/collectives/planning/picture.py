"""Draws a plan: text for a terminal, a picture of devices and rounds."""

from tfscale.collectives.planning.collective_plan import CollectivePlan
from tfscale.formatting import new_figure

_STORE_COLOR, _ADD_COLOR = "#3b6fa5", "#c9702b"
_LINE_COLOR = "#dddddd"


def as_text(plan: CollectivePlan) -> str:
    """A line for each device, a column for each round: what it gets.

    `3+0` is chunk 0 from device 3, which is added to the device's own; `3:0`
    is stored.

    Args:
        plan: What to draw.

    Example:

    >>> from tfscale.collectives.planning.algorithms import two_shot
    >>> print(as_text(two_shot("all_reduce", 3)))
    two_shot all_reduce: 3 devices, 3 chunks, 2 rounds
      device 0  1+0,2+0  2:2,1:1
      device 1  2+1,0+1  0:0,2:2
      device 2  0+2,1+2  1:1,0:0
    """
    cells = [
        [
            ",".join(
                f"{send.source}{'+' if send.adds else ':'}{send.chunk}"
                for send in sends
                if send.target == device
            )
            for sends in plan.rounds
        ]
        for device in range(plan.num_devices)
    ]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [_headline(plan)]
    for device, row in enumerate(cells):
        padded = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join([f"  device {device}", *padded]).rstrip())
    return "\n".join(lines)


def _headline(plan: CollectivePlan) -> str:
    """Algorithm, operation and sizes of a plan, in a line.

    >>> from tfscale.collectives.planning.algorithms import direct
    >>> _headline(direct("reduce", 4, root=2))
    'direct reduce to device 2: 4 devices, 1 chunk, 1 round'
    """
    root = "" if plan.root is None else f" to device {plan.root}"
    return (
        f"{plan.name} {plan.operation}{root}: "
        f"{_count(plan.num_devices, 'device')}, "
        f"{_count(plan.num_chunks, 'chunk')}, "
        f"{_count(plan.num_rounds, 'round')}"
    )


def save_png(plan: CollectivePlan, path: str) -> None:
    """Draws who sends to whom, round by round.

    A line for each device and a column for each round: an arrow is a message,
    with the chunks in it; of one colour if they are added, of another if they
    are stored.

    Args:
        plan: What to draw.
        path: Where to write the PNG.

    Raises:
        ImportError: If matplotlib is not installed.

    Example:

    >>> import os
    >>> import tempfile
    >>> from tfscale.collectives.planning.algorithms import two_shot
    >>> path = os.path.join(tempfile.mkdtemp(), "two_shot.png")
    >>> save_png(two_shot("all_reduce", 4), path)
    """
    height = 1.6 + 0.45 * max(plan.num_devices, 4)
    width = max(1.6 * plan.num_rounds, 4) + 1.5
    figure = new_figure(
        "save_png",
        "use `as_text`, which needs nothing",
        figsize=(width, height),
    )
    from matplotlib.lines import Line2D

    _draw_rounds(figure.subplots(), plan)
    figure.suptitle(_headline(plan), weight="bold")
    kinds = {send.adds for sends in plan.rounds for send in sends}
    figure.legend(
        handles=[
            Line2D([], [], color=color, label=label)
            for adds, color, label in (
                (True, _ADD_COLOR, "chunk is added"),
                (False, _STORE_COLOR, "chunk is stored"),
            )
            if adds in kinds
        ],
        loc="outside lower right",
        ncols=2,
        frameon=False,
    )
    figure.savefig(path, dpi=80)


def _draw_rounds(axes, plan):
    messages = {}
    for number, sends in enumerate(plan.rounds):
        for send in sends:
            key = (number, send.source, send.target, send.adds)
            messages.setdefault(key, []).append(send.chunk)
    for (number, source, target, adds), chunks in messages.items():
        color = _ADD_COLOR if adds else _STORE_COLOR
        axes.annotate(
            "",
            xy=(number + 0.85, target),
            xytext=(number, source),
            arrowprops={
                "arrowstyle": "-|>",
                "color": color,
                "shrinkA": 3,
                "shrinkB": 3,
            },
        )
        if plan.num_chunks > 1:
            # A quarter of a line below or above its device, on the arrow.
            way = 0.26 / abs(target - source)
            axes.text(
                number + 0.85 * way,
                source + way * (target - source),
                _ranges(chunks),
                fontsize=8,
                ha="center",
                va="center",
                bbox={"boxstyle": "round,pad=0.1", "color": "white"},
                zorder=5,
            )
    axes.set_yticks(
        range(plan.num_devices),
        [f"device {device}" for device in range(plan.num_devices)],
    )
    axes.set_xticks(
        [number + 0.45 for number in range(plan.num_rounds)],
        [f"round {number}" for number in range(plan.num_rounds)],
    )
    axes.hlines(
        range(plan.num_devices),
        0,
        max(plan.num_rounds, 1),
        _LINE_COLOR,
        zorder=0,
    )
    axes.set_ylim(plan.num_devices - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _ranges(chunks):
    """`0-2,5` for 0, 1, 2 and 5."""
    found = []
    for chunk in sorted(chunks):
        if found and found[-1][1] == chunk - 1:
            found[-1][1] = chunk
        else:
            found.append([chunk, chunk])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)


def _count(number, name):
    return f"{number} {name}{'' if number == 1 else 's'}"
