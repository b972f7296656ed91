"""`pipeline`: from a user's arguments to a `tf.data.Dataset`."""

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.data.caches import memory
from tfscale.data.chain import caching
from tfscale.data.chain import chain
from tfscale.data.chain import named
from tfscale.data.chain import parsing
from tfscale.data.chain.recipe import Recipe
from tfscale.data.chain.resumable_dataset import ResumableDataset
from tfscale.data.explaining import lints
from tfscale.data.order import windows
from tfscale.data.order.epoch_plan import make_plan
from tfscale.data.order.position import Position
from tfscale.data.sources.source import Source
from tfscale.data.sources.source import StreamSource
from tfscale.data.sources.source import of_worker
from tfscale.integers import check_integer

_BUILDERS = "arrays, csv, dataset, files, image_folder, text, tfds, ..."
_INT64 = 1 << 63


def pipeline(
    source: Source,
    *,
    batch_size: int,
    parse: Callable[..., Any] | None = None,
    parse_batch: Callable[..., Any] | None = None,
    augment: Callable[..., Any] | None = None,
    shuffle: bool | int = True,
    seed: int = 0,
    remainder: str = "keep",
    padding: Any = None,
    cache: str = "auto",
    cache_dir: str | os.PathLike[str] | None = None,
    input_context: tf.distribute.InputContext | None = None,
    shard: str = "records",
    prefetch: int = tf.data.AUTOTUNE,
    parallelism: int = tf.data.AUTOTUNE,
    options: tf.data.Options | None = None,
) -> ResumableDataset:
    """The input pipeline of a source: everything in the right order.

    Args:
        source: A source, such as `arrays`, `tfrecords` or `image_folder`
            return.
        batch_size: Integer, the global batch size.
        parse: Function from a record to the arguments of the model; the same
            record must always give the same result. A tuple comes as several
            arguments.
        parse_batch: Function of a batch of records, such as strings of shape
            `(batch,)` from TFRecord files, that returns the results of `parse`
            along its first dimension, as `tf.io.parse_example` does. It may
            replace `parse`; if both are given, they are compared on some
            records. Small records are parsed many times faster so.
        augment: Function of a parsed record, with one more argument `seed`, an
            int64 tensor of shape `(2,)` for `tf.random.stateless_*` and
            `tf.image.stateless_*`. The seed depends only on the pipeline's
            seed, the epoch and the record.
        shuffle: Whether each epoch has its own order. An integer is the number
            of records that are mixed at a time if a source cannot be read at
            random, as in `Dataset.shuffle`. By default 512, or 16 MiB of small
            records, or as many as fit the budget.
        seed: Integer, the seed of order and augmentation.
        remainder: Treatment of records that do not fill the last batch:
            `"keep"`, a smaller batch; `"drop"`; or `"pad"`, records of weight 0
            in an added `sample_weight`. Keras' `weighted_metrics` are as
            without padding; its loss is divided by all records of a batch, so
            for an exact loss, add it to these metrics.
        padding: None if records have one shape; or a number, with which each
            batch is padded to its longest record (strings with ""), as in
            `Dataset.padded_batch`; or a structure like a record, with a number
            or string for each component. Order and position stay the same. Each
            replica's batch has its own length.
        cache: The cache of parsed records: `"memory"`, filled while they are
            read; `"file"`, in `cache_dir`, written now and kept for later
            runs; `"none"`, False or None; or `"auto"`: memory if they fit the
            budget, else file if there is a `cache_dir` with room, else none.
        cache_dir: String, a directory on a local disk, which pipelines may
            share. A cache is identified by the names and sizes of its data, and
            by a few records, which are also parsed again and compared. Delete
            it if data changes in place.
        input_context: `tf.distribute.InputContext` of
            `distribute_datasets_from_function`; by default one worker.
        shard: `"records"`: the order of the records over all workers is that of
            one worker; or `"files"`: each worker reads only its own files.
        prefetch: Integer or `tf.data.AUTOTUNE`: batches prepared ahead.
        parallelism: Integer or `tf.data.AUTOTUNE`: records read at a time.
        options: `tf.data.Options`. Without `deterministic`, no slow record
            delays later ones; an epoch has the same records, but no exact order
            or resume. `autotune.ram_budget` is the number of bytes for caches
            and buffers; by default half of the free memory of the machine or
            its cgroup.

    Returns:
        A `ResumableDataset`, which is a `tf.data.Dataset` of batches.

    Raises:
        TypeError: If `source` is no source, or a number no integer.
        ValueError: If workers would not get equal batches, no batch is left,
            the budget is too small, or a function is random that must not be.
        OSError: If a cache file cannot be written.

    Example:

    >>> import numpy as np
    >>> from tfscale import data
    >>> dataset = data.pipeline(
    ...     data.arrays(np.arange(10)), batch_size=4, shuffle=False
    ... )
    >>> [batch.tolist() for batch in dataset.as_numpy_iterator()]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """
    _check_source(source)
    check_integer("seed", seed, -_INT64, "an integer of 64 bits")
    check_integer("batch_size", batch_size)
    _check_tuned("prefetch", prefetch, 0)
    _check_tuned("parallelism", parallelism, 1)
    options = tf.data.Options().merge(options or tf.data.Options())
    window = _shuffle_window(shuffle)
    context = input_context or tf.distribute.InputContext()
    source, sizes = of_worker(source, shard, context)
    plan = make_plan(
        num_records=source.num_records,
        batch_size=batch_size,
        remainder=remainder,
        workers=context.num_input_pipelines,
        worker=context.input_pipeline_id,
        replicas=context.num_replicas_in_sync,
        sizes=sizes,
    )
    budget = options.autotune.ram_budget
    budget = memory.budget() if budget is None else budget
    if isinstance(source, StreamSource) and source.kind == "dataset":
        findings = lints.lint(source.dataset)
        for finding in findings + lints.lint_order(source.dataset):
            warnings.warn(str(finding), stacklevel=2)
    raw = _first_of(source)
    if parse is None and parse_batch is not None:
        parse = parsing.of_one(parse_batch)
    window = windows.window_size(source, bool(shuffle), window, budget)
    recipe = Recipe(
        source=source,
        plan=plan,
        parse=parse,
        augment=augment,
        shuffle=bool(shuffle),
        window=window,
        spec=None,
        parallelism=parallelism,
        prefetch=prefetch,
        padding=padding,
        options=_options(options, context),
    )
    parsed = recipe.map_parsed(tf.data.Dataset.from_tensors(raw))
    _check_dense(parsed.element_spec)
    first = parsed.get_single_element()
    lints.check_functions(parsed, augment)
    recipe = dataclasses.replace(recipe, spec=_spec_of(recipe, first))
    recipe = parsing.decided(recipe, parse_batch)
    can_name = named.can_name(recipe, functools.partial(chain.made, recipe))
    recipe = dataclasses.replace(recipe, names_failed=can_name)
    recipe = caching.cached(recipe, cache, cache_dir, first, budget)
    position = Position(seed, plan.end)
    dataset = chain.build(recipe, position)
    return ResumableDataset(dataset, recipe, position)


def _check_source(source):
    """Refuses an object that no builder returned."""
    if isinstance(source, Source):
        return
    advice = f"what a builder of `tfscale.data` returns ({_BUILDERS})"
    if isinstance(source, tf.data.Dataset):
        advice = "`tfscale.data.dataset(...)` around it"
    elif hasattr(source, "__array__"):
        advice = "`tfscale.data.arrays(...)` around it"
    raise TypeError(
        "`source` must be an object that a builder of `tfscale.data` "
        f"returned. Received: a {type(source).__name__}. Use {advice}."
    )


def _check_tuned(name, value, least):
    if value != tf.data.AUTOTUNE:
        rule = f"{least} or more, or `tf.data.AUTOTUNE`"
        check_integer(name, value, least, rule)


def _shuffle_window(shuffle):
    """The number of records that are mixed at a time; None if not given."""
    if shuffle is None or isinstance(shuffle, bool | np.bool_):
        return None
    rule = "True, False or the number of records mixed at a time, 1 or more"
    check_integer("shuffle", shuffle, 1, rule)
    return shuffle


def _first_of(source):
    try:
        return source.first()
    except StopIteration:
        raise ValueError(
            f"The dataset must not be empty. Received: {source.kind} that ends "
            f"before its first record, where {source.num_records} were "
            "promised."
        ) from None


def _check_dense(spec):
    specs = tf.nest.flatten(spec)
    if not specs or not all(isinstance(one, tf.TensorSpec) for one in specs):
        raise TypeError(
            "`parse` must return a structure of dense tensors. Received: "
            f"{spec}. Return something from `parse`, and convert ragged or "
            "sparse tensors there, with `to_tensor(shape=...)` or "
            "`tf.sparse.to_dense`."
        )


def _spec_of(recipe, first):
    """The spec of a record; with padding, None for sizes that differ."""
    if recipe.padding is None:
        return keras.tree.map_structure(tf.TensorSpec.from_tensor, first)
    known = recipe.map_parsed(recipe.source.sample(1)).element_spec

    def spec_of_any(known, first):
        shape = known.shape
        if shape.rank is None:
            shape = [None] * first.shape.rank
        return tf.TensorSpec(shape, first.dtype)

    return keras.tree.map_structure(spec_of_any, known, first)


def _options(asked, context):
    options = tf.data.Options().merge(asked)
    options.deterministic = asked.deterministic is not False
    # The chain prefetches before its last map, which costs nothing.
    options.experimental_optimization.inject_prefetch = False
    # With several workers, tf.distribute must not divide the records again;
    # with one, it must not divide them by files.
    policies = tf.data.experimental.AutoShardPolicy
    options.experimental_distribute.auto_shard_policy = (
        policies.OFF if context.num_input_pipelines > 1 else policies.DATA
    )
    return options
