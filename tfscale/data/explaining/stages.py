"""The stages of a pipeline: prefixes to be timed, and possible gains.

The stages of a `ResumableDataset` are one map, so it is built again from
changed recipes. Other datasets have a prefix for each transformation.
"""

import dataclasses
import os
from collections.abc import Iterator
from collections.abc import Sequence

import tensorflow as tf

from tfscale.data.caches import memory
from tfscale.data.chain import chain
from tfscale.data.chain.resumable_dataset import ResumableDataset
from tfscale.data.explaining.explanation import StageTime
from tfscale.data.explaining.explanation import Suggestion
from tfscale.data.order.position import Position
from tfscale.graphs.dataset_graph import chain_of

_AUTO = tf.data.AUTOTUNE
_MOST_SAVED = 0.95  # of a batch's time


def prefixes(dataset: tf.data.Dataset) -> list[tuple[str, tf.data.Dataset]]:
    """Names and prefixes of a pipeline, each prefix one stage longer.

    An element of each prefix is a batch's worth.
    """
    if isinstance(dataset, ResumableDataset):
        return _recipe_prefixes(dataset.recipe)
    return _chain_prefixes(dataset)


def with_prefetch(
    dataset: tf.data.Dataset,
) -> tuple[str, tf.data.Dataset] | None:
    """A change to prefetching that tf.data tunes, and the changed dataset.

    None if a pipeline prefetches so already, and if another dataset ends with
    `prefetch`, of any number.
    """
    if isinstance(dataset, ResumableDataset):
        recipe = dataset.recipe
        if recipe.prefetch == _AUTO:
            return None
        recipe = dataclasses.replace(recipe, prefetch=_AUTO)
        changed = chain.build(recipe, Position(0))
        return "prefetch=tf.data.AUTOTUNE", changed
    if _timed(dataset)[-1].is_a("Prefetch"):
        return None
    return "prefetch(tf.data.AUTOTUNE) at the end", dataset.prefetch(_AUTO)


def estimates(
    dataset: tf.data.Dataset, times: Sequence[StageTime]
) -> Iterator[Suggestion]:
    """Changes whose gain follows from the `times` of the stages.

    In parallel, a sequential stage takes its share of a processor; a cache
    saves all but the reading.
    """
    if isinstance(dataset, ResumableDataset):
        saved = _recipe_savings(dataset.recipe, times)
    else:
        saved = _chain_savings(dataset, times)
    # Of the longest prefix: reading ahead hides some of the time.
    longest = max(time.total_seconds for time in times)
    for text, seconds in saved:
        yield Suggestion(text, 1 / (1 - min(seconds / longest, _MOST_SAVED)))


def _recipe_prefixes(recipe):
    bare = dataclasses.replace(
        recipe,
        source=dataclasses.replace(recipe.source, decode=None),
        parse=None,
        parse_batch=None,
        augment=None,
        cache=None,
        spec=None,
        names_failed=False,
    )
    steps = [("read", bare)]
    if recipe.parses:
        name = "parse" if recipe.cache is None else "parse or cache"
        steps.append((name, dataclasses.replace(recipe, augment=None)))
    if recipe.augment is not None:
        steps.append(("augment", recipe))
    found = []
    for name, step in steps:
        if recipe.batchwise:
            batches = chain.keyed_batches(step, Position(0))
        else:
            records = chain.keyed_records(step.quickest(), Position(0))
            records = records.map(lambda key, record: key)
            batches = records.batch(recipe.plan.batch_size)
        found.append((name, batches.with_options(recipe.options)))
    batched = dataclasses.replace(recipe, prefetch=0)
    found.append(("batch", chain.build(batched, Position(0))))
    if recipe.prefetch:
        found.append(("prefetch", chain.build(recipe, Position(0))))
    return found


def _recipe_savings(recipe, times):
    if recipe.parallelism != _AUTO:
        mapped = [t for t in times if t.name not in ("batch", "prefetch")]
        seconds = sum(t.added_seconds for t in mapped)
        share = _idle_share(recipe.parallelism)
        yield "parallelism=tf.data.AUTOTUNE", seconds * share
    if recipe.cache is None and recipe.parses and recipe.record_bytes():
        need = recipe.record_bytes() * recipe.source.num_records
        where = "memory" if need <= memory.budget() else "file"
        read, parsed = times[:2]
        seconds = parsed.total_seconds - read.total_seconds
        yield f"cache={where!r} ({need / 2**20:.0f} MiB)", seconds


def _idle_share(calls):
    """The share of processors that `calls` parallel calls leave idle."""
    return 1 - calls / max(os.cpu_count() or 1, calls)


def _timed(dataset):
    """The stages that are timed; a pipeline is one of them."""
    chain = [
        stage
        for stage in chain_of(dataset)
        if not stage.is_a("Options", "Restructured")
    ]
    for number, stage in enumerate(chain):
        if stage.is_a("Resumable"):
            return chain[number:]
    return chain


def _chain_prefixes(dataset):
    found, scale = [], 1
    for stage in reversed(_timed(dataset)):
        prefix = stage.dataset
        if scale > 1:
            prefix = prefix.map(lambda *_: 0).batch(scale)
        found.append((stage.name, prefix))
        if stage.is_a("Batch", "ParallelBatch", "PaddedBatch"):
            scale *= stage.settings["batch_size"]
        if stage.is_a("FlatMap", "Interleave", "ParallelInterleave", "Unbatch"):
            break  # elements before it cannot be counted in batches
    return found[::-1]


def _chain_savings(dataset, times):
    stages = _timed(dataset)
    # After the augmentation of a pipeline, nothing is worth caching.
    may_cache = not stages[0].is_a("Resumable")
    measured = dict(zip(reversed(stages), reversed(times)))
    worth_caching = None
    for stage in stages:
        time = measured.get(stage)
        calls = stage.settings.get("num_parallel_calls", 1)
        if (
            stage.is_a("Map", "Interleave", "ParallelMap", "ParallelInterleave")
            and time is not None
            and calls != _AUTO
        ):
            yield (
                f"num_parallel_calls=AUTOTUNE for the {stage.name}",
                time.added_seconds * _idle_share(calls),
            )
        # The last deterministic map before anything random or stateful.
        if stage.is_a("Cache"):
            worth_caching, may_cache = None, False
        may_cache &= not (stage.random or stage.is_a("Shuffle"))
        if may_cache and time and stage.is_a("Map", "ParallelMap"):
            worth_caching = stage
    if worth_caching is not None:
        # To read a cache takes as long as to read the source.
        seconds = measured[worth_caching].total_seconds
        yield (
            f"cache() after the {worth_caching.name}",
            seconds - times[0].total_seconds,
        )
