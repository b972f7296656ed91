"""Summaries in the style of `keras.Model.summary`, and figures."""

import contextlib
import io
import shutil
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import rich.console
import rich.table
import rich.text

# The width of `model.summary()` for models with branches.
_LINE_LENGTH = 108
_WIDE = 10_000  # Tables and lines have their own widths.


def colored(number) -> str:
    """A number in Keras' color of numbers, as rich markup."""
    return f"[color(34)]{number}[/]"


def readable_bytes(num_bytes: float) -> str:
    """A number of bytes with a unit, as Keras writes it."""
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1024:
            return f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TB"


def table_length(line_length: int | None, least: int) -> int:
    """Columns of a table: as asked, or 108, or those of the terminal."""
    if not line_length:
        columns = shutil.get_terminal_size().columns - 4
        return max(least, min(_LINE_LENGTH, columns))
    if line_length < least:
        raise ValueError(
            "A summary needs room for its columns. Received: "
            f"line_length={line_length}. Use {least} or more."
        )
    return line_length


def print_table(
    head: str,
    table: rich.table.Table,
    lines: Iterable[tuple[str, str]],
    line_length: int,
    print_fn: Callable[[str], None] | None = None,
) -> None:
    """Prints a head, a table and titled lines, or passes all to `print_fn`.

    A line that is too long for the table is several.
    """
    options: dict[str, Any] = {"width": _WIDE, "highlight": False}
    if print_fn is not None:
        options |= {"force_terminal": False, "color_system": None}
    console = rich.console.Console(**options)
    capture = console.capture()
    with contextlib.nullcontext() if print_fn is None else capture:
        console.print(head)
        console.print(table)
        for title, text in lines:
            whole = rich.text.Text.from_markup(f"[bold]{title}:[/] {text}")
            for line in whole.wrap(console, line_length - 1):
                line.rstrip()
                console.print(" ", line, sep="", soft_wrap=True)
    if print_fn is not None:
        rows = capture.get().splitlines()
        print_fn("\n".join(row.rstrip() for row in rows))


def as_text(*contents: Any, width: int) -> str:
    """Tables, and lines as they are, one below the other."""
    with io.StringIO() as out:
        console = rich.console.Console(file=out, width=width, highlight=False)
        for each in contents:
            console.print(each, markup=not isinstance(each, str))
        return out.getvalue()


def new_figure(instead: str, **options: Any) -> Any:
    """A figure of matplotlib for `save_png`, to be saved as a PNG.

    `instead` names an alternative for the error without matplotlib, and
    `options` are arguments of `matplotlib.figure.Figure`.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "`save_png` needs matplotlib. Install it with "
            f"`pip install tfscale[plot]`, or {instead}."
        ) from error
    # Not pyplot: it would keep the figure and choose the user's backend.
    figure = Figure(layout="constrained", **options)
    FigureCanvasAgg(figure)
    return figure
