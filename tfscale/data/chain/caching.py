"""The cache of a pipeline: memory, else file, else none."""

import dataclasses
import os
import shutil

import tensorflow as tf

from tfscale.data.caches import file_cache
from tfscale.data.caches import memory
from tfscale.data.caches.file_cache import FileCache
from tfscale.data.caches.memory_cache import MemoryCache
from tfscale.data.chain import chain
from tfscale.data.order.epoch_plan import make_plan
from tfscale.data.order.position import Position

KINDS = ("auto", "memory", "file", "none")
_COMPARED = 8  # records of a cache that are parsed again and compared


def cached(recipe, kind, cache_dir, first, budget):
    """The recipe with its cache; `budget` is in bytes of memory."""
    if kind is False or kind is None:
        kind = "none"
    if kind not in KINDS:
        raise ValueError(
            f"`cache` must be one of {KINDS}. Received: cache={kind!r}."
        )
    if cache_dir is not None:
        cache_dir = os.fspath(cache_dir)
        if "://" in cache_dir:
            raise ValueError(
                "`cache_dir` must be a local directory, because remote file "
                "systems are too slow for random access. Received: "
                f"cache_dir={cache_dir!r}."
            )
    if recipe.source.order is not None:
        if kind in ("memory", "file"):
            raise ValueError(
                "A mixture cannot be cached: its sources are in memory or on "
                f"disk already. Received: cache={kind!r}. Use cache='none'."
            )
        return dataclasses.replace(recipe, cache_reason="a mixture has none")
    need = memory.size_of(first) * recipe.source.num_records
    fits = f"{need / 2**20:.1f} MiB of records, {budget / 2**20:.0f} MiB budget"
    if kind == "memory" and need > budget:
        raise ValueError(
            "Parsed records must fit the memory budget to be cached in "
            f"memory. Received: {fits}. Use cache='auto', smaller records, or "
            "a larger `ram_budget` in `options.autotune`."
        )
    if kind == "memory" and not recipe.has_one_shape:
        raise ValueError(
            "Records of several lengths cannot be cached in memory. Received: "
            "cache='memory', `padding`. Use cache='file' with a `cache_dir`, "
            "or 'none'."
        )
    if kind == "file" and cache_dir is None:
        raise ValueError(
            "cache='file' needs a directory. Received: cache_dir=None."
        )
    reason = "as asked"
    if kind == "auto":
        kind, reason = _choose(recipe, cache_dir, need, budget), fits
    cache = None
    if kind == "memory":
        cache = MemoryCache(recipe.spec, recipe.source.num_records)
    elif kind == "file":
        cache = _file(recipe, cache_dir, need)
    return dataclasses.replace(
        recipe, cache=cache, cache_kind=kind, cache_reason=reason
    )


def _choose(recipe, cache_dir, need, budget):
    source = recipe.source
    if source.in_memory and not recipe.parses:
        return "none"  # the records are in memory as they are
    if need <= budget and recipe.has_one_shape:
        return "memory"
    if cache_dir is not None:
        os.makedirs(cache_dir, exist_ok=True)
        if need < shutil.disk_usage(cache_dir).free:
            return "file"
    return "none"


def _file(recipe, cache_dir, need):
    source = recipe.source
    numbers, some = source.some(_COMPARED)
    directory = file_cache.path_of(cache_dir, source, recipe.spec, some)
    plan = make_plan(
        num_records=source.num_records, batch_size=1, remainder="keep"
    )
    in_order = dataclasses.replace(
        recipe, plan=plan, shuffle=False, augment=None
    )
    records = chain.keyed_records(in_order, Position(0))
    records = records.map(lambda _, record: record).prefetch(tf.data.AUTOTUNE)
    records = records.with_options(recipe.options)
    file_cache.write(directory, records, recipe.spec, need)
    cache = FileCache(directory, recipe.spec)
    cache.check(numbers, recipe.map_parsed(some))
    return cache
