"""The arguments of a pipeline, and its decisions."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.data.caches.file_cache import FileCache
from tfscale.data.caches.memory_cache import MemoryCache
from tfscale.data.order.epoch_plan import EpochPlan
from tfscale.data.sources.source import Source


def call(function, record, **kwargs):
    """Calls a function of a record as `tf.data` does.

    A tuple is arguments, but no named one. A list that is returned is a tuple,
    one within the result a tensor.
    """
    arguments = record if type(record) is tuple else (record,)
    result = function(*arguments, **kwargs)
    return _without_lists(tuple(result) if isinstance(result, list) else result)


def mapped(dataset, function):
    """A dataset whose elements, tuples included, `function` has taken whole."""
    # A tuple is several arguments to `map`.
    is_tuple = type(dataset.element_spec) is tuple
    return dataset.map(lambda *one: function(one if is_tuple else one[0]))


@tf.autograph.experimental.do_not_convert
def _without_lists(structure):
    return keras.tree.traverse(
        lambda one: (
            tf.convert_to_tensor(one) if isinstance(one, list) else None
        ),
        structure,
    )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that the chain is built from.

    The first fields are checked arguments of `pipeline`; `source` has the
    records of this worker. `spec` is that of a parsed record, or None if
    records are not checked.
    """

    source: Source
    plan: EpochPlan
    parse: Callable[..., Any] | None
    augment: Callable[..., Any] | None
    shuffle: bool
    window: int  # records mixed at a time, of a source not read at random
    spec: Any
    parallelism: int
    prefetch: int
    options: tf.data.Options
    cache: FileCache | MemoryCache | None = None
    cache_kind: str = "none"  # or "memory", "file"; for explanations
    cache_reason: str = "as asked"
    # Function of a batch of records as they are read.
    parse_batch: Callable[..., Any] | None = None
    batchwise: bool = False  # whether records are batched before `augment`
    parse_reason: str = ""
    names_failed: bool = False  # see `named`
    padding: Any = None

    @property
    def has_one_shape(self):
        """Whether all parsed records have one shape."""
        return all(
            spec.shape.is_fully_defined()
            for spec in keras.tree.flatten(self.spec)
        )

    def quickest(self):
        """The recipe with the quick decoder, if `names_failed`."""
        if not self.names_failed:
            return self
        decode = self.source.quick_decode
        source = dataclasses.replace(self.source, decode=decode)
        return dataclasses.replace(self, source=source)

    def parallel(self):
        """Arguments of a parallel map."""
        if self.parallelism == 1:
            return {}
        arguments = {"num_parallel_calls": self.parallelism}
        if self.names_failed:  # a gap in the order names a failed record
            arguments["deterministic"] = True
        return arguments

    def get_or_make(self, index, make):
        """Parsed records of `index`: from the cache, or from `make()`."""
        if self.cache is None:
            return make()
        return self.cache.get_or_make(index, make)

    def decoded(self, record):
        """The record, or the batch of records, after its source's decoder."""
        decode = self.source.decode
        return record if decode is None else call(decode, record)

    def parsed(self, record):
        """The record after the decoder of its source and `parse`."""
        record = self.decoded(record)
        if self.parse is not None:
            record = call(self.parse, record)
        if record is None:
            raise TypeError(
                "`parse` must return the parsed record. Received: None. Is "
                "there a `return`?"
            )
        return record

    @property
    def parses(self):
        """Whether records differ from those that are read."""
        return self.source.decode is not None or self.parse is not None

    def map_parsed(self, records):
        """A dataset of unparsed records, parsed."""
        if not self.parses:
            return records
        return mapped(records, self.parsed)

    def parsed_batch(self, batch):
        """A parsed batch of records, along its first dimension."""
        batch = self.decoded(batch)
        if self.parse_batch is None:
            return batch
        batch = call(self.parse_batch, batch)
        keras.tree.assert_same_structure(self.spec, batch)
        return keras.tree.map_structure(
            lambda spec, tensor: tf.ensure_shape(
                tensor, [None, *spec.shape.as_list()]
            ),
            self.spec,
            batch,
        )

    def record_bytes(self):
        """Bytes of a parsed record, or 0 if its size is not fixed."""
        specs = keras.tree.flatten(self.spec)
        has_strings = any(spec.dtype == tf.string for spec in specs)
        if has_strings or not self.has_one_shape:
            return 0
        return sum(
            spec.dtype.size * spec.shape.num_elements() for spec in specs
        )

    @tf.autograph.experimental.do_not_convert
    def checked(self, index, record):
        """The record, whose shape must be that of the first one.

        A shape that is known when the graph is created costs nothing; any other
        is compared for each record, so that the error names the record.
        """
        if self.spec is None:
            return record
        try:
            keras.tree.assert_same_structure(self.spec, record)
        except ValueError as error:
            raise ValueError(
                "`parse` must return one structure for every record."
            ) from error
        return keras.tree.map_structure(
            lambda spec, tensor: _checked(index, spec, tensor),
            self.spec,
            record,
        )


def _checked(index, spec, tensor):
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.is_fully_defined():
        return tensor
    if not spec.shape.is_fully_defined():  # padded in batches
        return tf.ensure_shape(tensor, spec.shape)
    want = spec.shape.as_list()
    check = tf.debugging.Assert(
        tf.reduce_all(tf.equal(tf.shape(tensor), want))
        if tensor.shape.rank is not None
        else tf.reduce_all(tf.equal(tf.rank(tensor), len(want)))
        & (tf.size(tensor) == tf.cast(spec.shape.num_elements(), tf.int32)),
        [
            "Records must have one shape, or they cannot be batched. Record",
            index,
            "has shape",
            tf.shape(tensor),
            "and record 0 has",
            tf.constant(want, tf.int32),
            "Resize, crop or pad in `parse`, or use `padding`.",
        ],
        summarize=8,
    )
    with tf.control_dependencies([check]):
        return tf.ensure_shape(tf.identity(tensor), want)
