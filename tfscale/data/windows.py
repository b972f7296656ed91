"""Shuffled records from sources that are read in runs of neighbours.

Two levels, as in CorgiPile (Xu et al., SIGMOD 2022): the blocks of an epoch
come in a random order, as many as fit the window are read at a time, and the
records of a window are mixed among themselves.

    blocks      [a a a] [b b b] [c c c] [d d d] ...
    permuted    [c c c] [a a a] | [d d d] [b b b] | ...    windows of 2
    mixed       a c c a c a     | b d b d d b     | ...

Both permutations are functions of (seed, epoch), so an epoch is entered at any
position by reading the window that holds it. Where the window holds the whole
source, this is a full shuffle.
"""

import tensorflow as tf

from tfscale.data import order
from tfscale.data import stream
from tfscale.data.source import DAMAGED

_MIX = 0x5EED  # so that blocks and records are not shuffled alike


def blocks_per_window(source, window):
    """How many blocks a window of so many records takes: at least one."""
    return max(int(window // max(int(source.blocks[:, 0].max()), 1)), 1)


def block_records(recipe, position):
    """A dataset of `(key, raw)` for a `BlockSource`, in order.

    Args:
        recipe: `Recipe`.
        position: `Position`.

    Returns:
        `tf.data.Dataset` of an int64 key and a scalar string.
    """
    reader = _WindowReader(recipe, position)
    ahead = tf.data.Dataset.from_tensors(0).map(reader.windows, name="position")
    # One window is read while the one before it is handed out.
    return (
        ahead.unbatch()
        .map(reader.read, num_parallel_calls=1, name="read")
        .prefetch(1)
        .unbatch()
    )


class _WindowReader:
    """Which windows an epoch has, and what is in one."""

    def __init__(self, recipe, position):
        self._recipe = recipe
        self._position = position
        self._source = recipe.source
        self._plan = recipe.plan
        counts = self._source.blocks[:, 0]
        self._num_blocks = len(counts)
        self._counts = tf.constant(counts, tf.int64)
        self._firsts = tf.cumsum(self._counts, exclusive=True)
        self._per_window = blocks_per_window(self._source, recipe.window)
        self._num_windows = -(-len(counts) // self._per_window)
        self._longest = int(counts.max())

    def _blocks(self, begin, end, seed, epoch):
        blocks = tf.range(begin, tf.minimum(end, self._num_blocks))
        blocks = tf.cast(blocks, tf.int64)
        if not self._recipe.shuffle:
            return blocks
        return order.shuffled(blocks, self._num_blocks, seed, epoch)

    def windows(self, _):
        """Head and number and first position of each window left."""
        plan, per, total = self._plan, self._per_window, self._num_windows
        seed, epoch, start, steps = stream.place(self._position, plan)
        counts = tf.gather(
            self._counts, self._blocks(0, per * total, seed, epoch)
        )
        ends = tf.cumsum(counts)[per - 1 :: per]
        ends = tf.concat([ends[: total - 1], tf.reduce_sum(counts)[None]], 0)
        begins = tf.concat([tf.zeros([1], tf.int64), ends[:-1]], 0)
        # Positions past the records pad the last batch, from the last window.
        last, size = plan.slice_of(steps - 1, start)
        needed = (ends > start) & (begins < last + size)
        needed |= (tf.range(total) == total - 1) & (
            last + size > plan.num_records
        )
        window = tf.where(needed)[:, 0]
        head = tf.stack([seed, epoch, start, steps])
        head = tf.repeat(head[tf.newaxis], tf.size(window), axis=0)
        begin = tf.gather(begins, window)
        length = plan.num_steps
        return tuple(stream.declare(t, length) for t in (head, window, begin))

    def read(self, head, window, begin):
        """Keys and raw records of a window, this worker's, in order."""
        plan = self._plan
        where = tf.unstack(head)
        seed, epoch, start, steps = where
        first_block = window * self._per_window
        blocks = self._blocks(
            first_block, first_block + self._per_window, seed, epoch
        )
        counts = tf.gather(self._counts, blocks)
        firsts = tf.gather(self._firsts, blocks)
        records = tf.ragged.range(firsts, firsts + counts).values
        size = tf.reduce_sum(counts)

        last, last_size = plan.slice_of(steps - 1, start)
        end = tf.where(
            window == self._num_windows - 1,
            tf.maximum(last + last_size, begin + size),
            begin + size,
        )
        positions = tf.range(tf.maximum(begin, start), end)
        step = (positions - start) // plan.global_batch
        first, length = plan.slice_of(step, start)
        mine = (positions >= first) & (positions < first + length)
        mine &= step % self._recipe.num_lanes == self._recipe.lane
        positions = tf.boolean_mask(positions, mine & (step < steps))
        within = (positions - begin) % size
        if self._recipe.shuffle:
            within = order.shuffled(
                within, size, seed + _MIX, epoch * self._num_windows + window
            )
        raw = tf.gather(self._raw(blocks, size), within)
        records = tf.gather(records, within)
        self._check(records, raw)
        keys = stream.keys_of(where, records, positions, plan)
        length = plan.slice_size
        return stream.declare(keys, length), stream.declare(raw, length)

    def _check(self, records, raw):
        """Raises with file and offset if a record could not be read."""
        damaged = tf.boolean_mask(records, tf.equal(raw, DAMAGED))
        # A block ends at its first damage: what follows counts as damaged.
        none = tf.cast(self._source.num_records - 1, tf.int64)
        path, offset = self._source.place(
            tf.reduce_min(tf.concat([damaged, none[tf.newaxis]], 0))
        )
        tf.debugging.Assert(
            tf.size(damaged) == 0,
            [
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
            # One hop for each record and one copy: a batch of them is moved
            # around less than batches of batches.
            records = tf.data.Dataset.from_tensor_slices(blocks).interleave(
                self._source.read_block,
                block_length=self._longest,
                deterministic=True,
                **self._recipe.interleave(),
            )
            return records.batch(size).get_single_element()

        if self._recipe.cache is None:
            return read()
        # What is all in memory need not be read again.
        return tf.cond(
            self._recipe.cache.is_full(), lambda: tf.fill([size], ""), read
        )


def stream_records(recipe, position):
    """A dataset of `(key, raw)` for a `StreamSource`, in order.

    The order is that of a shuffle buffer whose seed is a function of (seed,
    epoch). It is entered at a position by reading up to it, before anything
    costly is done to a record.

    Args:
        recipe: `Recipe`.
        position: `Position`.

    Returns:
        `tf.data.Dataset` of an int64 key and the record.
    """
    source, plan = recipe.source, recipe.plan

    def epoch_of(seed, epoch, start, steps):
        records = source.dataset.enumerate()
        if recipe.shuffle:
            key = order.augmentation_seed(seed, epoch, _MIX)
            records = _shuffled(records, recipe.window, key)
        last, size = plan.slice_of(steps - 1, start)
        end = plan.global_batch * steps + start
        padding = tf.maximum(end - plan.num_records, 0)
        if plan.remainder == "pad":
            records = records.concatenate(
                source.dataset.enumerate().repeat().take(padding)
            )
        records = records.enumerate().skip(start)

        def mine(place, _):
            step = (place - start) // plan.global_batch
            first, length = plan.slice_of(step, start)
            mine = (place >= first) & (place < first + length)
            mine &= step % recipe.num_lanes == recipe.lane
            return mine & (step < steps)

        if plan.num_workers > 1 or recipe.num_lanes > 1:
            records = records.filter(mine)
        else:
            records = records.take(last + size - start)

        def keyed(place, record):
            number, raw = record
            keys = stream.keys_of(
                (seed, epoch, start, steps), number[None], place[None], plan
            )
            return keys[0], raw

        return records.map(keyed)

    head = tf.data.Dataset.from_tensors(0).map(
        lambda _: stream.place(position, plan), name="position"
    )
    return head.flat_map(epoch_of)


def _shuffled(records, window, key):
    """`records.shuffle`, from a seed that is a tensor, and from nothing else.

    `Dataset.shuffle` would mix in the seed of `tf.random.set_seed`, so that
    the order were no function of the position.
    """
    specs = tf.nest.flatten(records.element_spec)
    plain = [isinstance(spec, tf.TensorSpec) for spec in specs]
    variant = tf.raw_ops.ShuffleDataset(
        input_dataset=tf.data.experimental.to_variant(records),
        buffer_size=tf.constant(window, tf.int64),
        seed=tf.cast(key[0], tf.int64),
        seed2=tf.cast(key[1], tf.int64),
        # Ragged and sparse tensors travel as variants.
        output_types=[
            spec.dtype if one else tf.variant for spec, one in zip(specs, plain)
        ],
        output_shapes=[
            spec.shape if one else tf.TensorShape(None)
            for spec, one in zip(specs, plain)
        ],
        reshuffle_each_iteration=False,
    )
    return tf.data.experimental.from_variant(variant, records.element_spec)
