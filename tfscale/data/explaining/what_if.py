"""Stages of a pipeline to be timed, and changes to it to be tried.

A `ResumableDataset` is built again from a changed recipe. Any other dataset is
taken apart and changed as a graph.
"""

import dataclasses
import functools
from collections.abc import Callable

import tensorflow as tf

from tfscale import _internals
from tfscale.data.caches import memory
from tfscale.data.caches.memory_cache import MemoryCache
from tfscale.data.chain import chain
from tfscale.data.chain.resumable_dataset import ResumableDataset
from tfscale.data.explaining.dataset_graph import DatasetGraph
from tfscale.data.order.position import Position
from tfscale.data.order.position import PositionReadAhead
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.source import IndexedSource


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

    Args:
        dataset: `tf.data.Dataset`.

    Returns:
        List of `(name, dataset)`; an element of each is a batch's worth.
    """
    if isinstance(dataset, ResumableDataset):
        return _recipe_stages(dataset.recipe)
    return _graph_stages(DatasetGraph(dataset))


def changes(dataset, cached_batches):
    """What could be tried.

    Args:
        dataset: `tf.data.Dataset`.
        cached_batches: Integer: a cache is tried with so many batches, which
            are read again and again.

    Returns:
        List of `Change`.
    """
    if isinstance(dataset, ResumableDataset):
        return list(_recipe_changes(dataset.recipe, cached_batches))
    return list(_graph_changes(dataset, cached_batches))


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
    if isinstance(recipe.source, BlockSource) and recipe.interleaved_reads < 16:
        yield change("interleaved_reads=16", interleaved_reads=16)
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


def _graph_stages(graph):
    chain_ = graph.stages()
    prefixes, scale = [], 1
    for stage in reversed(chain_):
        if stage.is_a("Options", "Model", "FiniteTake"):
            continue
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


def _graph_changes(dataset, count):
    ours = _stages_of_a_pipeline(dataset)
    chain_ = DatasetGraph(dataset).stages()[ours:]
    auto = tf.data.AUTOTUNE
    for stage in chain_:
        for text, edit, overlaps in _edits(stage, DatasetGraph(dataset)):
            yield Change(text, _edited(dataset, stage, edit), overlaps)
    real = [s for s in chain_ if not s.is_a("Options", "Model")]
    if not real[-1].is_a("Prefetch"):
        yield Change(
            "prefetch(tf.data.AUTOTUNE) at the end",
            lambda: dataset.prefetch(auto),
            overlaps=True,
        )
    # After a pipeline's augmentation, nothing is.
    last = None if ours else _last_worth_caching(chain_)
    if last is not None:
        edited = _edited(dataset, last, functools.partial(_insert_cache, count))
        yield Change(
            f"cache() after the {_name(last)}",
            lambda: edited().repeat(),
            warm_up=count,
        )


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


def _edits(stage, graph):
    """`(text, edit, overlaps)` for what a stage could be instead."""
    auto = tf.data.AUTOTUNE

    def to(position, value):
        return lambda g, s: g.set_constant(s, position, value)

    if stage.is_a("Map"):
        yield "num_parallel_calls=AUTOTUNE for the map", _parallel_map, False
    fixed = stage.is_a("ParallelMap", "ParallelInterleave")
    if fixed and (graph.constant(stage, -1) or auto) != auto:
        text = f"num_parallel_calls=AUTOTUNE for the {_name(stage)}"
        yield text, to(-1, auto), False
    if stage.is_a("Interleave"):
        text = "num_parallel_calls=AUTOTUNE for the interleave"
        yield text, _parallel_interleave, False
    if stage.is_a("Prefetch") and graph.constant(stage, 1) not in (None, auto):
        yield "prefetch(tf.data.AUTOTUNE)", _autotuned_prefetch, True


def _edited(dataset, stage, edit):
    def make():
        graph = DatasetGraph(dataset)
        edit(graph, stage)
        return graph.dataset()

    return make


def _autotuned_prefetch(graph, stage):
    graph.set_constant(stage, 1, tf.data.AUTOTUNE)
    # What `prefetch` sets beside it: a buffer that doubles whenever it was
    # full and ran empty. The other kind stops growing at half of a burst.
    graph.nodes()[stage.node].attr["legacy_autotune"].b = True


def _parallel_map(graph, stage):
    node = graph.nodes()[stage.node]
    node.op = "ParallelMapDatasetV2"
    node.input.append(graph.add_constant(tf.data.AUTOTUNE))
    node.attr.pop("force_synchronous", None)
    node.attr["deterministic"].s = b"true"


def _parallel_interleave(graph, stage):
    node = graph.nodes()[stage.node]
    node.op = "ParallelInterleaveDatasetV4"
    auto = graph.add_constant(tf.data.AUTOTUNE)
    node.input.extend([auto, auto, auto])  # output, input buffers, calls
    node.attr["deterministic"].s = b"true"


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


def _insert_cache(count, graph, stage):
    """Some elements, kept in memory and repeated, in place of a stage."""
    nodes = graph.nodes()
    stages_ = graph.stages()
    after = stages_[[s.node for s in stages_].index(stage.node) + 1 :]
    for one in after:
        if one.is_a("Batch", "ParallelBatch", "PaddedBatch"):
            count *= graph.constant(one, 1) or 1
    taken = graph.add_node(
        "TakeDataset", [stage.node, graph.add_constant(count)], stage
    )
    cached = graph.add_node(
        "CacheDataset", [taken, graph.add_constant("")], stage
    )
    for node in nodes.values():
        for at, name in enumerate(node.input):
            if name == stage.node:
                node.input[at] = cached
