"""Plans as a table, and as a picture of time against memory."""

from collections.abc import Sequence

import rich.console
import rich.table

from tfscale.formatting import colored
from tfscale.formatting import print_line
from tfscale.formatting import readable_bytes
from tfscale.pipeline.planner.cost import Prediction
from tfscale.pipeline.planner.device import Device
from tfscale.pipeline.planner.layers import ModelTable
from tfscale.pipeline.planner.search import USABLE
from tfscale.pipeline.planner.search import best_of_each_mesh
from tfscale.pipeline.planner.search import frontier
from tfscale.pipeline.planner.search import why_slower

_NUM_ROWS = 10


def render_table(
    console: rich.console.Console,
    ranked: Sequence[Prediction],
    table: ModelTable,
    title: str,
    device: Device,
    line_length: int,
) -> None:
    """Writes the best plan of each mesh, and why it is slower than the last.

    Args:
        console: Where to.
        ranked: All plans, the fastest first.
        table: The model.
        title: What was planned.
        device: The device.
        line_length: Columns of the table.
    """
    of_meshes = best_of_each_mesh(ranked)
    shown = of_meshes[:_NUM_ROWS]
    best = shown[0]
    console.print(f"[bold]Plans:[/] {title}")
    unit = "Examples" if table.tokens is None else "Tokens"
    rows = rich.table.Table(
        rich.table.Column("Data x pipeline\nx model", justify="center"),
        rich.table.Column("Microbatches\nand settings", ratio=1, min_width=22),
        rich.table.Column(f"Step\n{unit}/s\nMFU", justify="right"),
        rich.table.Column("Memory\nBubble", justify="right"),
        rich.table.Column("Bytes sent\nby axis", justify="right"),
        rich.table.Column("Slower by", max_width=15),
        width=line_length,
        show_lines=True,
    )
    for p, faster in zip(shown, [None, *shown]):
        s = p.settings
        settings = [str(s.num_microbatches)]
        settings[0] += f" x {s.schedule}" * (s.pipeline > 1)
        if s.stages_per_device > 1:
            settings.append(f"{s.stages_per_device} stages a device")
        settings += ["recompute"] * s.recompute
        settings += [f"zero_stage={s.zero_stage}"] * (s.zero_stage > 0)
        settings += ["sequence_parallel"] * s.sequence_parallel
        speed = p.tokens_per_second or p.examples_per_second
        rows.add_row(
            f"{s.data} x {s.pipeline} x {s.model}",
            "\n".join(settings),
            f"{colored(_seconds(p.step_seconds))}\n{speed:,.0f}\n"
            f"{100 * p.mfu:.1f} %",
            f"{colored(readable_bytes(p.num_bytes))}\n{100 * p.bubble:.1f} %",
            "\n".join(
                f"{axis} {readable_bytes(num_bytes)}"
                for axis, num_bytes in p.traffic.items()
                if num_bytes
            ),
            "" if faster is None else why_slower(p, faster),
        )
    console.print(rows)
    causes = ", ".join(
        f"{cause} {100 * seconds / best.step_seconds:.1f} %"
        for cause, seconds in best.seconds.items()
        if seconds > 0.0005 * best.step_seconds
    )
    lines = [
        ("Time of the best", causes),
        (
            "Memory",
            f"at most {100 * USABLE:.0f} % of {readable_bytes(device.memory)}",
        ),
        *(("Note", note) for note in table.notes),
    ]
    if len(of_meshes) > len(shown):
        lines.append(("Meshes not shown", str(len(of_meshes) - len(shown))))
    for name, text in lines:
        print_line(console, name, text, line_length)


def save_png(
    ranked: Sequence[Prediction], device: Device, title: str, path: str
) -> None:
    """Draws the time of plans against their memory; see `Plans.save_png`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "`save_png` needs matplotlib. Install it with "
            "`pip install tfscale[plot]`, or use `table`, which needs nothing."
        ) from error
    # Not pyplot: it would keep the figure and choose the user's backend.
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()

    def points(predictions):
        return zip(*((p.num_bytes / 1e9, p.step_seconds) for p in predictions))

    best = frontier(ranked)
    x, y = points(ranked)
    axes.scatter(x, y, s=8, color="lightgray", label="plan")
    axes.plot(
        *points(best), marker="o", color="tab:blue", label="best for its memory"
    )
    for p in best:
        s = p.settings
        axes.annotate(
            f"{s.data} x {s.pipeline} x {s.model}",
            (p.num_bytes / 1e9, p.step_seconds),
            textcoords="offset points",
            xytext=(4, 4),
            fontsize=7,
        )
    axes.axvline(USABLE * device.memory / 1e9, color="tab:red", label="limit")
    axes.set(
        title=title,
        xlabel="memory of a device (GB)",
        ylabel="time of a step (s)",
        yscale="log",
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=100)


def _seconds(seconds):
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
