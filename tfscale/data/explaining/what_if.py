"""Stages of a pipeline to be timed, and changes to it to be tried.

A `ResumableDataset` is built again from a changed recipe. Of any other dataset
the times of its stages tell what a change would gain.
"""

import dataclasses
import os
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence

import tensorflow as tf

from tfscale import _internals
from tfscale.data.caches import memory
from tfscale.data.caches.memory_cache import MemoryCache
from tfscale.data.chain import chain
from tfscale.data.chain.resumable_dataset import ResumableDataset
from tfscale.data.explaining.explanation import StageTime
from tfscale.data.explaining.explanation import Suggestion
from tfscale.data.order.position import Position
from tfscale.data.order.position import PositionReadAhead
from tfscale.data.sources.source import IndexedSource
from tfscale.dataset_graph import DatasetGraph

_MOST_SAVED = 0.95  # of a batch's time: something is always left


@dataclasses.dataclass(frozen=True)
class Change:
    """Something that could be done to a pipeline.

    Attributes:
        text: String: what to do, in the user's words.
        make: Function that returns the changed dataset.
        overlaps: Whether it gains by working while the model does, which
            only shows when somebody works.
        warm_up: Integer, batches to take before its gain shows.
    """

    text: str
    make: Callable[[], tf.data.Dataset]
    overlaps: bool = False
    warm_up: int = 0


def stages(dataset):
    """Prefixes of a pipeline, each one stage longer.

    Returns:
        List of `(name, dataset)`; an element of each is a batch's worth.
    """
    if isinstance(dataset, ResumableDataset):
        return _recipe_stages(dataset.recipe)
    return _graph_stages(DatasetGraph(dataset))


def changes(dataset, cached_batches):
    """What could be tried.

    A cache is tried with so many batches, which are read again and again.
    """
    if isinstance(dataset, ResumableDataset):
        return list(_recipe_changes(dataset.recipe, cached_batches))
    return list(_prefetches(dataset))


def build(recipe):
    """A plain dataset of a recipe, with a position of its own.

    It stays at the beginning of an epoch: what is measured is read again.
    """
    position = PositionReadAhead(Position(0))
    return chain.build(recipe, position).with_options(recipe.options)


def _recipe_stages(recipe):
    bare = dataclasses.replace(
        recipe,
        source=_undecoded(recipe.source),
        parse=None,
        parse_batch=None,
        augment=None,
        cache=None,
        spec=None,
    )
    steps = [("read", bare)]
    if recipe.source.decode is not None or recipe.parse is not None:
        parsed = dataclasses.replace(recipe, augment=None)
        name = "parse" if recipe.cache is None else "parse or cache"
        steps.append((name, parsed))
    if recipe.augment is not None:
        steps.append(("augment", recipe))
    prefixes = []
    for name, part in steps:
        if recipe.batchwise:
            batches = chain.keyed_batches(part, Position(0))
        else:
            records = chain.keyed_records(part.quickest(), Position(0))
            records = records.map(lambda key, record: key)
            batches = records.batch(recipe.plan.batch_size)
        prefixes.append((name, batches.with_options(recipe.options)))
    unfetched = dataclasses.replace(recipe, prefetch=0)
    prefixes.append(("batch", build(unfetched)))
    if recipe.prefetch:
        prefixes.append(("prefetch", build(recipe)))
    return prefixes


def _undecoded(source):
    if isinstance(source, IndexedSource):
        source = dataclasses.replace(source, quick_decode=None)
    return dataclasses.replace(source, decode=None)


def _recipe_changes(recipe, count):
    def change(text, overlaps=False, **kwargs):
        changed = dataclasses.replace(recipe, **kwargs)
        return Change(text, lambda: build(changed), overlaps)

    auto = tf.data.AUTOTUNE
    if recipe.parallelism != auto:
        yield change("parallelism=tf.data.AUTOTUNE", parallelism=auto)
    if recipe.prefetch != auto:
        yield change("prefetch=tf.data.AUTOTUNE", True, prefetch=auto)
    works = recipe.parse is not None or recipe.source.decode is not None
    if recipe.cache is None and works and recipe.record_bytes():
        need = recipe.record_bytes() * recipe.source.num_records
        where = "memory" if need <= memory.budget() else "file"
        text = f"cache={where!r} ({need / 2**20:.0f} MiB)"
        cached = dataclasses.replace(
            recipe, cache=MemoryCache(recipe.spec, recipe.source.num_records)
        )
        yield Change(
            text,
            lambda: build(cached).take(count).repeat(),
            warm_up=count,
        )


def _timed(graph):
    """The stages that are timed, the last one first."""
    return [
        stage
        for stage in reversed(graph.stages())
        if not stage.is_a("Options", "Model", "FiniteTake")
    ]


def _graph_stages(graph):
    prefixes, scale = [], 1
    for stage in _timed(graph):
        prefix = graph.dataset(stage)
        if scale > 1:
            prefix = prefix.map(lambda *_: 0).batch(scale)
        prefixes.append((_name(stage), prefix))
        if stage.is_a("Batch", "ParallelBatch", "PaddedBatch"):
            scale *= graph.constant(stage, 1) or 1
        if stage.is_a("FlatMap", "Interleave", "ParallelInterleave", "Unbatch"):
            break  # elements before it cannot be counted in batches
    return prefixes[::-1]


def _name(stage):
    words = stage.op.split("Dataset")[0]
    spaced = "".join(f" {c.lower()}" if c.isupper() else c for c in words)
    return spaced.strip()


def estimated(
    dataset: tf.data.Dataset, times: Sequence[StageTime]
) -> Iterator[Suggestion]:
    """Changes of a graph whose gain follows from the `times` of its `stages`.

    A stage that works one by one takes, in parallel, its share of a processor;
    a cache saves all but the reading.
    """
    graph = DatasetGraph(dataset)
    ours = _stages_of_a_pipeline(dataset)
    chain_ = graph.stages()[ours:]
    measured = {
        stage.node: time for stage, time in zip(_timed(graph), times[::-1])
    }
    # Of the longest prefix: what runs ahead of the consumer hides some of it.
    longest = max(time.total_seconds for time in times)

    def suggestion(text, saved):
        share = min(saved / longest, _MOST_SAVED)
        return Suggestion(text, 1 / (1 - share))

    for stage in chain_:
        time = measured.get(stage.node)
        calls = 1
        if stage.is_a("ParallelMap", "ParallelInterleave"):
            calls = graph.constant(stage, -1) or tf.data.AUTOTUNE
        elif not stage.is_a("Map", "Interleave"):
            continue
        if time is not None and calls != tf.data.AUTOTUNE:
            share = 1 - calls / max(os.cpu_count() or 1, calls)
            yield suggestion(
                f"num_parallel_calls=AUTOTUNE for the {_name(stage)}",
                time.added_seconds * share,
            )
    # After a pipeline's augmentation, nothing is.
    last = None if ours else _last_worth_caching(chain_)
    if last is not None and last.node in measured:
        yield suggestion(
            f"cache() after the {_name(last)}",
            # To read a cache takes as long as to read the source.
            measured[last.node].total_seconds - times[0].total_seconds,
        )


def _prefetches(dataset):
    """Prefetching is tried: what it gains in bursts no mean time tells."""
    graph = DatasetGraph(dataset)
    last, text = _timed(graph)[0], "prefetch(tf.data.AUTOTUNE)"
    if not last.is_a("Prefetch"):
        text += " at the end"
    elif graph.constant(last, 1) in (None, tf.data.AUTOTUNE):
        return
    yield Change(text, lambda: dataset.prefetch(tf.data.AUTOTUNE), True)


def _stages_of_a_pipeline(dataset):
    """How many of the first stages of a dataset are a `ResumableDataset`'s.

    Those are in the right order, and have names in a recipe only: explain the
    pipeline by itself.
    """
    while not isinstance(dataset, ResumableDataset):
        inputs = _internals.inputs_of(dataset)
        if len(inputs) != 1:
            return 0
        (dataset,) = inputs
    stages_ = DatasetGraph(dataset).stages()
    return len([s for s in stages_ if not s.is_a("Options", "Model")])


def _last_worth_caching(chain_):
    """The last deterministic map before anything random or stateful."""
    last = None
    for stage in chain_:
        if stage.is_a("Cache"):
            return None
        if stage.random or stage.is_a("Shuffle"):
            break
        if stage.is_a("Map", "ParallelMap"):
            last = stage
    return last
