"""A batch of a replica in microbatches: all at once, or each by its index."""

from typing import Any

import keras
import tensorflow as tf

from tfscale.step import losses

_ONE_NUMBER_OF_ROWS = (
    "All tensors of a batch must have one number of rows. Received: "
)


class Microbatches:
    """The rows of a replica, cut into microbatches.

    Of N rows in M microbatches each has N // M, the first N % M one more.

    Attributes:
        more_rows: For each loop over microbatches, the rows that they have
            beyond the last; None if known in the loop only. XLA has to know it.
        num_rows: The number of rows, a scalar of int32.
    """

    def __init__(
        self,
        data: Any,
        num_microbatches: int,
        is_compiled: bool = False,
    ):
        self._structure = data
        self._tensors = [_tensor(each) for each in keras.tree.flatten(data)]
        with_rows = [each for each in self._tensors if _has_rows(each)]
        if not with_rows:
            raise ValueError(
                "A batch must have rows to be cut into microbatches. "
                "Received: data without a tensor that has a dimension."
            )
        found = {each.shape[0] for each in with_rows}
        known, rule = found - {None}, _ONE_NUMBER_OF_ROWS
        if len(known) > 1:
            raise ValueError(f"{rule}{sorted(known)}.")
        self._num_known = known.pop() if known else None
        self._num_microbatches = num_microbatches
        rows = [tf.shape(each)[0] for each in with_rows]
        self.num_rows = rows[0]
        if None in found and len(rows) > 1:
            rows = tf.stack(rows)
            is_one = tf.reduce_all(tf.equal(rows, self.num_rows))
            check = tf.raw_ops.Assert(condition=is_one, data=[rule, rows])
            with tf.control_dependencies([check]):
                self.num_rows = tf.identity(self.num_rows)
        is_even = self._even_size is not None
        self.more_rows: tuple[int | None, ...] = (0,) if is_even else (None,)
        if is_compiled and not is_even:
            self.more_rows = (1, 0)

    @property
    def _even_size(self) -> int | None:
        """Rows of each microbatch, if known and all equal."""
        rows, count = self._num_known, self._num_microbatches
        return None if not rows or rows % count else rows // count

    def split(self) -> list[tuple[tf.Tensor, Any]]:
        """All microbatches, each with how many of its rows count, a scalar.

        Of a batch with fewer rows than there are microbatches, some get a row
        that counts nothing, because many operations fail on no rows.
        """
        count, size = self._num_microbatches, self._even_size
        if size is not None:
            sizes = [size] * count
            divided = [tf.split(each, count) for each in self._tensors]
        else:
            # Also of a known number, so that one static shape is that of all
            # microbatches: a loop takes one after the other.
            rows = tf.raw_ops.PlaceholderWithDefault(
                input=self.num_rows, shape=[]
            )
            more = tf.cast(tf.range(count) < rows % count, tf.int32)
            sizes = tf.unstack(rows // count + more)
            some = [tf.maximum(size, 1) for size in sizes]
            divided = [
                tf.split(_with_rows(each, count), some)
                for each in self._tensors
            ]
        return [
            (
                tf.cast(rows, losses.precision()),
                keras.tree.pack_sequence_as(self._structure, tensors),
            )
            for rows, *tensors in zip(sizes, *divided)
        ]

    def microbatch(
        self, index: tf.Tensor, count: tf.Tensor, more_rows: int | None
    ) -> Any:
        """Microbatch `index` of `count`, in the structure of the data."""
        size = self._even_size
        if size is not None:
            begin = index * size
        else:
            size, num_longer = self.num_rows // count, self.num_rows % count
            begin = index * size + tf.minimum(index, num_longer)
            if more_rows is None:
                size += tf.cast(index < num_longer, tf.int32)
            else:
                # At most as long as the batch if no microbatch is longer.
                size = tf.minimum(size + more_rows, self.num_rows)
        return keras.tree.pack_sequence_as(
            self._structure,
            [
                _rows(each, begin, size) if _has_rows(each) else each
                for each in self._tensors
            ],
        )


def _tensor(value):
    if value is None:
        return None
    if isinstance(value, tf.SparseTensor | tf.RaggedTensor):
        raise TypeError(
            "Only dense tensors can be cut into microbatches. Received: a "
            f"{type(value).__name__}. Make it dense (`to_tensor`, "
            "`tf.sparse.to_dense`) in the dataset."
        )
    return tf.convert_to_tensor(value)


def _has_rows(tensor):
    return tensor is not None and tensor.shape.rank != 0


def _rows(tensor, begin, size):
    rest = tensor.shape.rank - 1
    rows = tf.slice(tensor, [begin, *[0] * rest], [size, *[-1] * rest])
    known = size if isinstance(size, int) else None
    return tf.ensure_shape(rows, [known, *tensor.shape[1:]])


def _with_rows(tensor, num_rows):
    """The tensor with at least some number of rows; new ones count nothing.

    They are copies of the first row, or ones where a replica has no row.
    """
    sizes = tf.shape(tensor)
    one = tf.zeros if tensor.dtype == tf.string else tf.ones
    row = one(tf.concat([[1], tf.maximum(sizes[1:], 1)], axis=0), tensor.dtype)
    row = tf.concat([tensor[:1], row], axis=0)[:1]
    # To repeat it is not implemented for all types.
    more = tf.gather(
        row, tf.zeros([tf.maximum(num_rows - sizes[0], 0)], "int32")
    )
    return tf.ensure_shape(
        tf.concat([tensor, more], axis=0), [None, *tensor.shape[1:]]
    )
