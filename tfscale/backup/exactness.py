"""What of a run's data comes out another way when it is drawn again."""

import logging

import tensorflow as tf

from tfscale import _internals
from tfscale.data.explaining.dataset_graph import DatasetGraph


def warn_of_inexact(epochs, name: str) -> None:
    """Warns, once for a `fit`, where a run cannot go on bit for bit.

    Args:
        epochs: The epoch iterator of Keras.
        name: What the data is for, "training" or "validation".
    """
    reasons = _reasons(epochs)
    if reasons:
        logging.warning(
            "After an interruption the %s data will not be what it would have "
            "been: %s. Use `tfscale.data`, or give each shuffle a seed.",
            name,
            "; ".join(reasons),
        )


def _reasons(epochs):
    source = _internals.source_of(epochs)
    if source is None:  # arrays, which Keras shuffles
        if _internals.shuffles_arrays(epochs) and not _has_global_seed():
            return ["arrays are shuffled without `keras.utils.set_random_seed`"]
        return []
    if not isinstance(source, tf.data.Dataset):
        return []
    graph = DatasetGraph(source)
    found = [r for stage in graph.all_stages() for r in _of_stage(stage, graph)]
    return list(dict.fromkeys(found))


def _of_stage(stage, graph):
    if stage.is_a("Shuffle", "ShuffleAndRepeat"):
        seeds = graph.constant(stage, 2), graph.constant(stage, 3)
        if seeds == (0, 0):
            yield "a `shuffle` has no seed"
    if stage.python:
        yield "Python functions or generators make it"
    elif stage.stateful_random and not _has_global_seed():
        yield f"{', '.join(stage.stateful_random)} draw without a seed"


def _has_global_seed():
    return _internals.eager_context.global_seed() is not None
