"""Cuts of a chain of layers, from the names of layers."""

import difflib
import itertools
from collections.abc import Sequence


def cuts_from_names(
    layer_names: Sequence[str], cut_layers: Sequence[str], num_stages: int
) -> tuple[int, ...]:
    """Cuts before the layers with which the stages after the first begin.

    `layer_names` are all layers in the order of the model, a layer that is used
    twice at its first use. The `ValueError` for a name that is none lists close
    ones.

    >>> cuts_from_names(["embed", "block_0", "block_1", "head"], ["block_1"], 2)
    (2,)
    """
    cut_layers = list(cut_layers)
    index_of = {}
    for index, name in enumerate(layer_names):
        index_of.setdefault(name, index)
    for name in cut_layers:
        if name not in index_of:
            close = difflib.get_close_matches(str(name), index_of, n=3)
            hint = close or [n for n in index_of if index_of[n]][:5]
            raise ValueError(
                "A cut point must be the name of a layer of the model. "
                f"Received: {name!r}. "
                + ("Did you mean " if close else "Layers are, for example, ")
                + ", ".join(map(repr, hint))
                + "?" * bool(close)
            )
    if len(cut_layers) != num_stages - 1:
        raise ValueError(
            f"{num_stages} stages need {num_stages - 1} cut points: the layer "
            "with which each stage but the first begins. Received: "
            f"{len(cut_layers)} cut points, {cut_layers}."
        )
    cuts = tuple(index_of[name] for name in cut_layers)
    if cuts and cuts[0] == 0:
        raise ValueError(
            "A cut point is the layer with which a stage begins, and the "
            "first stage always begins with the first layer. "
            f"Received: {cut_layers[0]!r}, the first layer. Name the layer "
            "with which the second stage begins."
        )
    if any(b <= a for a, b in itertools.pairwise(cuts)):
        in_order = sorted(set(cut_layers), key=index_of.__getitem__)
        raise ValueError(
            "Cut points must be different and in the order of the model. "
            f"Received: {cut_layers}. In order they are {in_order}."
        )
    return cuts
