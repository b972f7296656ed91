"""Shuffled records from sources that are read in runs of neighbors.

There are two levels, as in CorgiPile (Xu et al., SIGMOD 2022): the blocks of an
epoch come in a random order, those of one window are read at a time, and the
records of a window are mixed.

    blocks      [a a a] [b b b] [c c c] [d d d] ...
    permuted    [c c c] [a a a] | [d d d] [b b b] | ...    windows of 2
    mixed       a c c a c a     | b d b d d b     | ...

Both permutations are functions of (seed, epoch), so an iterator enters an epoch
by reading the window of its position. If the window holds the whole source,
this is a full shuffle.
"""

import tensorflow as tf

from tfscale.data import single_device
from tfscale.data.caches import memory
from tfscale.data.order import stream
from tfscale.data.order.epoch_plan import EpochStart
from tfscale.data.sources.source import DAMAGED
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.source import IndexedSource
from tfscale.data.sources.source import Source
from tfscale.data.sources.source import scalar_strings

_FAR = 1 << 60  # a position after all others
_INTERLEAVED_READS = 16  # at a time; most wait for a remote file system
_MIX = 0x5EED  # makes the order of records differ from that of blocks
# A choice: mixes records of 128 blocks; less if the memory is small.
_WINDOW_RECORDS = 512
_WINDOW_BYTES = 16 << 20  # or more records, where they are small
_COPIES = 4  # windows in memory: read, gathered, waiting, consumed


def window_size(
    source: Source, shuffle: bool, window: int | None, budget: int
) -> int:
    """The number of records that are mixed; `budget` is in bytes."""
    if not isinstance(source, BlockSource) and (
        isinstance(source, IndexedSource) or not shuffle
    ):
        return window or _WINDOW_RECORDS  # nothing is read ahead
    record = getattr(source, "record_bytes", 0) or memory.size_of(
        source.first()
    )
    fit = int(budget // (record * _COPIES + 1))
    if window is not None and min(window, source.num_records) > fit:
        raise ValueError(
            "The shuffle window must fit the memory budget. Received: "
            f"shuffle={window} records of {record:.0f} bytes ({_COPIES} "
            f"windows are kept at a time), and a budget of {budget} bytes. Use "
            f"{fit} or less, or a larger `ram_budget` in `options.autotune`."
        )
    if window is None:
        window = max(_WINDOW_RECORDS, int(_WINDOW_BYTES // (record + 1)))
    return max(min(window, fit), 1)


def block_records(recipe, begin):
    """A dataset of keys and records of a `BlockSource`, in order."""
    length = recipe.plan.slice_size
    return single_device.map_on_host(
        _read_windows(recipe, begin),
        lambda _, *tensors: stream.declare(tensors, length),
    ).unbatch()


def block_batches(recipe, begin):
    """A dataset of keys and records of a `BlockSource`: batches, in order.

    Batches are slices of windows: a map over single records would cost more
    than shuffling and reading them. All have the full length; the missing rows
    of a smaller last batch have `stream.NO_KEY`.
    """
    plan = recipe.plan
    size = plan.batch_size
    key = tf.TensorSpec([stream.KEY_SIZE], tf.int64)
    specs = tuple(
        tf.TensorSpec([None, *spec.shape], spec.dtype)
        for spec in tf.nest.flatten((key, recipe.source.record_spec))
    )

    def cut(left, window):
        last, *tensors = window
        keys, *raw = (
            tf.concat(two, 0) for two in zip(left, tf.nest.flatten(tensors))
        )
        count = tf.shape(keys)[0]
        number = count // size
        if plan.remainder == "keep":
            lacks = tf.where(last, -count % size, 0)
            keys = tf.pad(
                keys, [[0, lacks], [0, 0]], constant_values=stream.NO_KEY
            )
            raw = [
                tf.concat([t, tf.zeros([lacks, *t.shape[1:]], t.dtype)], 0)
                for t in raw
            ]
            number = (count + lacks) // size
        left = tuple(t[number * size :] for t in (keys, *raw))
        keys, *raw = (
            tf.reshape(t[: number * size], [number, size, *t.shape[1:]])
            for t in (keys, *raw)
        )
        raw = tf.nest.pack_sequence_as(recipe.source.record_spec, raw)
        return left, (keys, raw)

    none = [tf.zeros([0, *spec.shape[1:]], spec.dtype) for spec in specs]
    batches = single_device.scan_on_host(
        _read_windows(recipe, begin), none, specs, cut
    )
    # A scan itself compares shapes with those that are declared.
    return single_device.map_on_host(
        batches, lambda *t: stream.declare(t, plan.batches_per_step)
    ).unbatch()


def _read_windows(recipe, begin):
    reader = _WindowReader(recipe, begin)
    windows = single_device.map_on_host(
        tf.data.Dataset.from_tensors(0), reader.windows, name="position"
    )
    # One window is read while the window before it is consumed.
    read = single_device.map_on_host(
        windows.unbatch(), reader.read, num_parallel_calls=1, name="read"
    )
    return read.prefetch(1)


class _WindowReader:
    """The windows of an epoch, and their records."""

    def __init__(self, recipe, begin):
        self._recipe = recipe
        self._begin = begin
        self._source = recipe.source
        self._plan = recipe.plan
        counts = self._source.blocks[:, 0]
        self._num_blocks = len(counts)
        self._counts = tf.constant(counts, tf.int64)
        self._firsts = tf.cumsum(self._counts, exclusive=True)
        self._per_window = max(recipe.window // max(int(counts.max()), 1), 1)
        self._num_windows = -(-len(counts) // self._per_window)

    def _blocks(self, begin, end, where):
        blocks = tf.range(begin, tf.minimum(end, self._num_blocks))
        if not self._recipe.shuffle:
            return blocks
        key = [where.seed, where.epoch]
        return stream.shuffled(blocks, self._num_blocks, key)

    def windows(self, _):
        """Head, number, first position of each window left; is it the last?"""
        plan, per, total = self._plan, self._per_window, self._num_windows
        where = self._begin(self._recipe.plan)
        final = where.final
        blocks = self._blocks(tf.constant(0, tf.int64), self._num_blocks, where)
        counts = tf.gather(self._counts, blocks)
        counts = tf.pad(counts, [[0, per * total - self._num_blocks]])
        sizes = tf.reduce_sum(tf.reshape(counts, [total, per]), axis=1)
        begins = tf.cumsum(sizes, exclusive=True)
        # Positions past the records pad the last batch, from the last window.
        endless = tf.constant([0] * (total - 1) + [_FAR], tf.int64)
        needed = (begins + sizes + endless > where.first) & (begins <= final)
        needed |= tf.constant([False] * (total - 1) + [True]) & (
            final >= plan.num_records
        )
        window = tf.where(needed)[:, 0]
        head = tf.broadcast_to(tf.stack(where), [tf.size(window), len(where)])
        begin = tf.gather(begins, window)
        last = tf.equal(window, tf.reduce_max(window))
        return stream.declare((head, window, begin, last), plan.num_steps)

    def read(self, head, window, begin, last):
        """Whether it is the last window, and this worker's keys and records."""
        where = EpochStart(*tf.unstack(head))
        start, final = where.first, where.final
        first_block = window * self._per_window
        blocks = self._blocks(
            first_block, first_block + self._per_window, where
        )
        counts = tf.gather(self._counts, blocks)
        firsts = tf.gather(self._firsts, blocks)
        records = tf.ragged.range(firsts, firsts + counts).values
        size = tf.reduce_sum(counts)

        end = tf.minimum(begin + size, final + 1)
        end = tf.where(window == self._num_windows - 1, final + 1, end)
        positions = tf.range(tf.maximum(begin, start), end)
        if self._plan.num_workers > 1:
            mine = stream.of_worker(self._plan, positions, where)
            positions = tf.boolean_mask(positions, mine)
        within = (positions - begin) % size
        if self._recipe.shuffle:
            number = where.epoch * self._num_windows + window
            within = stream.shuffled(within, size, [where.seed + _MIX, number])
        raw = tf.nest.map_structure(
            lambda tensor: tf.gather(tensor, within), self._raw(blocks, size)
        )
        records = tf.gather(records, within)
        key = tf.stack([where.seed, where.epoch])
        keys = stream.keys_of(key, records, positions)
        checks = [
            self._check(records, tensor) for tensor in scalar_strings(raw, 1)
        ]
        with tf.control_dependencies(checks):
            keys = tf.identity(keys)
        return last, keys, raw

    def _check(self, records, strings):
        """Fails with file and offset if a record could not be read."""
        damaged = tf.equal(strings, DAMAGED)
        # All records of a block after its first damage count as damaged.
        none = tf.constant(self._source.num_records - 1, tf.int64)
        # A window may hold no record of this worker.
        first = tf.reduce_min(tf.where(damaged, records, none))
        first = tf.minimum(first, none)
        path, offset = self._source.locate(first)
        # `tf.debugging.Assert` would add 20 operations.
        return tf.raw_ops.Assert(
            condition=tf.logical_not(tf.reduce_any(damaged)),
            data=[
                "A record cannot be read: it is damaged, or its file has gone."
                " Received: file",
                path,
                "offset",
                offset,
                "To leave damaged records out, use on_damage='skip'.",
            ],
        )

    def _raw(self, blocks, size):
        def read():
            # A block is one element.
            records = single_device.interleave_on_host(
                tf.data.Dataset.from_tensor_slices(blocks),
                self._source.read_block,
                cycle_length=_INTERLEAVED_READS,
                block_length=1,
            )
            return records.rebatch(size).get_single_element()

        if self._recipe.cache is None:
            return read()
        # A full cache needs no records.

        def blank():
            return tf.nest.map_structure(
                lambda spec: tf.zeros([size, *spec.shape], spec.dtype),
                self._source.record_spec,
            )

        return tf.cond(self._recipe.cache.is_full(), blank, read)
