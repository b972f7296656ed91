"""A picture of when a step has which weights gathered (ZeRO stage 3)."""

from collections.abc import Sequence

from tfscale.formatting import new_figure
from tfscale.variables.gather_window import Stay

_FORWARD_COLOR, _BACKWARD_COLOR = "#3b6fa5", "#c9702b"


def save_png(stays: Sequence[Stay], path: str) -> None:
    """Draws a line for each weight, and a bar for each time it is gathered.

    Columns are uses of weights: of the forward, then, backwards, the backward.
    """
    if not stays:
        raise ValueError(
            "A picture of gathers is of weights that replicas divide. "
            "Received: a model of which each replica has all weights. Leave "
            "out `to_file`, or use zero_stage=3."
        )
    names = list(dict.fromkeys(stay.gather for stay in stays))
    size = (10, 1 + 0.25 * len(names))
    figure = new_figure("to_file", "leave it out", figsize=size)
    axes = figure.subplots()
    for stay in stays:
        is_forward = stay.start < len(names)
        axes.barh(
            names.index(stay.gather),
            stay.stop - stay.start,
            left=stay.start,
            color=_FORWARD_COLOR if is_forward else _BACKWARD_COLOR,
        )
    axes.axvline(len(names), color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), list(map(str, names)))
    axes.set_xticks([len(names) / 2, len(names) * 1.5], ["forward", "backward"])
    axes.invert_yaxis()
    axes.set_xlim(0, 2 * len(names))
    axes.tick_params(length=0)
    axes.set_title("Weights that are gathered", loc="left", weight="bold")
    figure.savefig(path, dpi=80)
