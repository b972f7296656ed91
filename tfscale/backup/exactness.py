"""Parts of a run's data that differ when it is read again."""

import logging

import keras
import tensorflow as tf

from tfscale._internals import fitting
from tfscale._internals import releases
from tfscale.data.chain.resumable_dataset import ResumableDataset
from tfscale.graphs.dataset_graph import stages_of


def warn_of_inexact(epochs, name: str, num_probes: int = 0) -> None:
    """Warns, once for a `fit`, if a run cannot continue bit for bit."""
    # Training with `steps_per_epoch` has one iterator for all epochs.
    is_cut_short = name == "validation" and bool(epochs.steps_per_epoch)
    reasons = _reasons(epochs, is_cut_short or num_probes > 0)
    if reasons:
        logging.warning(
            "After an interruption the %s data will differ: %s. Use "
            "`tfscale.data`, or give each shuffle a seed.",
            name,
            "; ".join(reasons),
        )


def warn_of_shared(training, validation) -> None:
    """Warns if iterators of one move seeds of the other's shuffles."""
    if _shuffles_of(training) & _shuffles_of(validation):
        logging.warning(
            "After an interruption training and validation data will differ: "
            "they share a `shuffle` that draws another order for each "
            "iterator of either. Give it `reshuffle_each_iteration=False`, "
            "without which a `take` and a `skip` have records in common too."
        )


def warn_of_earlier_iterators(epochs, count: int, saved: int) -> None:
    """Warns if a dataset was read another number of times in the process."""
    if count != saved and _shuffles_of(epochs):
        logging.warning(
            "After an interruption the data must be as in a new process. "
            "Received: a `tf.data.Dataset` with a `shuffle`, and %d iterators "
            "created by earlier calls of `fit` in this process, %d in the "
            "interrupted one: its order differs now. Start the program again, "
            "or create the dataset anew.",
            count,
            saved,
        )


def _shuffles_of(epochs):
    """The ids of shuffles that draw another order for each iterator."""
    source = fitting.source_of(epochs)
    if not isinstance(source, tf.data.Dataset):
        return set()
    return {
        id(stage.dataset)
        for stage in stages_of(source)
        if stage.is_a("Shuffle") and _is_new_each_epoch(stage)
    }


def _reasons(epochs, is_cut_short):
    source = fitting.source_of(epochs)
    if source is None:
        return list(_of_no_dataset(epochs))
    if not isinstance(source, tf.data.Dataset):
        return []
    stages = stages_of(source)
    found = [reason for stage in stages for reason in _of_stage(stage)]
    if is_cut_short and _shuffles_ahead(source, stages):
        found.append(
            "a `repeat` or `concatenate` after a `shuffle` shuffles again as "
            "soon as it is read ahead that far, which is a matter of luck in "
            "an iterator that is not read to its end (no `repeat`, "
            "`reshuffle_each_iteration=False`, or no `prefetch` and "
            "`tf.data.Options` with "
            "`experimental_optimization.inject_prefetch = False`)"
        )
    return list(dict.fromkeys(found))


def _of_no_dataset(epochs):
    data = epochs.data_adapter
    if hasattr(data, "py_dataset"):
        kind, base = type(data.py_dataset), keras.utils.PyDataset
        for name in ("on_epoch_begin", "on_epoch_end"):
            if getattr(kind, name) is not getattr(base, name):
                yield f"what `{name}` of `{kind.__name__}` changes is not saved"
    elif fitting.is_of_python(epochs):
        yield "a Python generator makes it"
    elif (
        fitting.shuffles_arrays(epochs)
        and releases.epoch_of_order(data) is None
        and not _has_global_seed()
    ):
        yield "arrays are shuffled without `keras.utils.set_random_seed`"


def _shuffles_ahead(source, stages):
    """Whether reading ahead may draw seeds of a shuffle too early.

    An iterator draws new seeds from the dataset whenever it begins its records
    again. TensorFlow reads ahead unless an option forbids it.
    """
    starts = [stage for stage in stages if _shuffles_late(stage)]
    if not starts:
        return False
    reads_ahead = any(
        stage.is_a("Prefetch", "ParallelBatch", "ParallelMap", "MapAndBatch")
        and any(start in _before(stage) for start in starts)
        for stage in stages
    )
    optimization = source.options().experimental_optimization
    return reads_ahead or optimization.inject_prefetch is not False


def shuffles_late(source: tf.data.Dataset) -> bool:
    """Whether an iterator draws seeds of a shuffle while it is read.

    Other iterators draw seeds when they are created.
    """
    return any(map(_shuffles_late, stages_of(source)))


def _shuffles_late(stage):
    return stage.is_a("Repeat", "Concatenate") and any(
        one.is_a("Shuffle") and one.settings["reshuffle_each_iteration"]
        for one in _before(stage)
    )


def _before(stage):
    found = list(stage.inputs)
    for one in found:
        found.extend(one.inputs)
    return found


def _of_stage(stage):
    if stage.is_a("Cache") and any(map(_is_new_each_epoch, _before(stage))):
        yield (
            "a `cache` keeps what it read first of data that is new in each "
            "epoch (put it before the `shuffle`, or use `cache=` of a pipeline)"
        )
    is_shuffle = stage.is_a("Shuffle", "ShuffleAndRepeat")
    if is_shuffle and not (stage.settings["seed"] or stage.settings["seed2"]):
        yield "a `shuffle` has no seed"
    if stage.python:
        yield "Python functions or generators make it"
    elif stage.stateful_random and not _has_global_seed():
        yield f"{', '.join(stage.stateful_random)} draw without a seed"


def _is_new_each_epoch(stage):
    if isinstance(stage.dataset, ResumableDataset):
        recipe = stage.dataset.recipe
        return recipe.shuffle or recipe.augment is not None
    return stage.is_a("Shuffle") and stage.settings["reshuffle_each_iteration"]


def _has_global_seed():
    # A graph has the seed of its thread.
    traced = tf.function(lambda: None).get_concrete_function()
    return traced.graph.seed is not None
