"""Plans as a table, and as a picture of time against memory."""

from collections.abc import Sequence

import rich.table

from tfscale.formatting import colored
from tfscale.formatting import new_figure
from tfscale.formatting import readable_bytes
from tfscale.planner.cost import Prediction
from tfscale.planner.device import Device
from tfscale.planner.search import best_of_each_mesh
from tfscale.planner.search import frontier
from tfscale.planner.search import why_slower

_NUM_ROWS = 10


def table(
    ranked: Sequence[Prediction], unit: str, line_length: int
) -> rich.table.Table:
    """The best plan of each mesh, and why it is slower than the last."""
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
    shown = best_of_each_mesh(ranked)[:_NUM_ROWS]
    for p, faster in zip(shown, [None, *shown]):
        s = p.settings
        settings = [str(s.num_microbatches)]
        settings[0] += f" x {s.schedule}" * (s.pipeline > 1)
        if s.stages_per_device > 1:
            settings.append(f"{s.stages_per_device} stages a device")
        settings += ["recompute"] * s.recompute
        settings += [f"zero_stage={s.zero_stage}"] * (s.zero_stage > 0)
        settings += ["sequence_parallel"] * s.sequence_parallel
        traffic = [
            f"{axis} {readable_bytes(num_bytes)}"
            for axis, num_bytes in p.traffic.items()
            if num_bytes
        ]
        rows.add_row(
            s.mesh,
            "\n".join(settings),
            f"{colored(_seconds(p.step_seconds))}\n"
            f"{p.tokens_per_second or p.examples_per_second:,.0f}\n"
            f"{100 * p.mfu:.1f} %",
            f"{colored(readable_bytes(p.num_bytes))}\n{100 * p.bubble:.1f} %",
            "\n".join(traffic),
            "" if faster is None else why_slower(p, faster),
        )
    return rows


def lines(
    ranked: Sequence[Prediction], device: Device, notes: Sequence[str]
) -> list[tuple[str, str]]:
    """The notes below the table, with their titles."""
    best, num_meshes = ranked[0], len(best_of_each_mesh(ranked))
    causes = (
        f"{cause} {100 * seconds / best.step_seconds:.1f} %"
        for cause, seconds in best.seconds.items()
        if seconds > 0.0005 * best.step_seconds
    )
    memory = f"at most {readable_bytes(device.usable_memory)}"
    found = [("Time of the best", ", ".join(causes)), ("Memory", memory)]
    found += [("Note", note) for note in notes]
    if num_meshes > _NUM_ROWS:
        found.append(("Meshes not shown", str(num_meshes - _NUM_ROWS)))
    return found


def save_png(
    ranked: Sequence[Prediction], device: Device, title: str, path: str
) -> None:
    """Draws the time of plans against their memory; see `Plans.save_png`."""
    figure = new_figure("use `table`, which needs nothing", figsize=(9, 6))
    axes = figure.subplots()

    def points(predictions):
        return zip(*((p.num_bytes / 1e9, p.step_seconds) for p in predictions))

    best = frontier(ranked)
    x, y = points(ranked)
    axes.scatter(x, y, s=8, color="lightgray", label="plan")
    axes.plot(*points(best), marker="o", label="best for its memory")
    for p in best:
        point = p.num_bytes / 1e9, p.step_seconds
        axes.annotate(p.settings.mesh, point, fontsize=7)
    axes.axvline(device.usable_memory / 1e9, color="tab:red", label="limit")
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
