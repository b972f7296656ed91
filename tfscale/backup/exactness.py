"""What of a run's data comes out another way when it is drawn again."""

import logging

import tensorflow as tf

from tfscale._internals import fitting
from tfscale._internals import symbols
from tfscale.dataset_graph import DatasetGraph


def warn_of_inexact(epochs, name: str, num_looks: int = 0) -> None:
    """Warns, once for a `fit`, where a run cannot go on bit for bit."""
    # Training with `steps_per_epoch` has one iterator for all epochs.
    is_cut_short = name == "validation" and bool(epochs.steps_per_epoch)
    reasons = _reasons(epochs, is_cut_short or num_looks > 0)
    if reasons:
        logging.warning(
            "After an interruption the %s data will not be what it would have "
            "been: %s. Use `tfscale.data`, or give each shuffle a seed.",
            name,
            "; ".join(reasons),
        )


def _reasons(epochs, is_cut_short):
    source = fitting.source_of(epochs)
    if source is None:  # arrays, which Keras shuffles
        if fitting.shuffles_arrays(epochs) and not _has_global_seed():
            return ["arrays are shuffled without `keras.utils.set_random_seed`"]
        return []
    if not isinstance(source, tf.data.Dataset):
        return []
    graph = DatasetGraph(source)
    found = [r for stage in graph.all_stages() for r in _of_stage(stage, graph)]
    if is_cut_short and _shuffles_ahead(source, graph):
        found.append(
            "a `repeat` or `concatenate` behind a `shuffle` shuffles anew as "
            "soon as it is read ahead that far, which is a matter of luck in "
            "an iterator that is not read to its end (no `repeat`, "
            "`reshuffle_each_iteration=False`, or no `prefetch` and "
            "`tf.data.Options` with "
            "`experimental_optimization.inject_prefetch = False`)"
        )
    return list(dict.fromkeys(found))


def _shuffles_ahead(source, graph):
    """Whether what is read ahead may take a seed that is then missed.

    The seeds of a shuffle are those of the dataset: an iterator takes the next
    ones whenever it begins its records again. TensorFlow reads ahead by itself,
    unless it is told not to.
    """
    stages = graph.all_stages()
    starts = [s for s in stages if _shuffles_late(s, graph)]
    if not starts:
        return False
    reads_ahead = any(
        stage.is_a("Prefetch", "ParallelBatch", "ParallelMap", "MapAndBatch")
        and any(start in _before(stage, graph) for start in starts)
        for stage in stages
    )
    optimization = source.options().experimental_optimization
    return reads_ahead or optimization.inject_prefetch is not False


def shuffles_late(source: tf.data.Dataset) -> bool:
    """Whether an iterator takes seeds of a shuffle when it is half read.

    Others take them when they are made.
    """
    graph = DatasetGraph(source)
    return any(_shuffles_late(stage, graph) for stage in graph.all_stages())


def _shuffles_late(stage, graph):
    if stage.is_a("Repeat") and graph.constant(stage, 1) in (0, 1):
        return False
    return stage.is_a("Repeat", "Concatenate") and any(
        one.is_a("Shuffle") and graph.attribute(one, "reshuffle_each_iteration")
        for one in _before(stage, graph)
    )


def _before(stage, graph):
    """The stages that a stage gets its elements from."""
    found = graph.inputs(stage)
    for one in found:
        found.extend(graph.inputs(one))
    return found


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
    return symbols.eager_context.global_seed() is not None
