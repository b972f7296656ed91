"""A batch that is cut into microbatches by rows, within a step."""

from typing import Any

import keras
import tensorflow as tf


class Batch:
    """What a replica has of a batch.

    Of N rows, microbatch m of M has those from N m // M to N (m + 1) // M.

    Args:
        data: What `train_step` gets: tensors in any structure, all with the
            same number of rows; `None` and scalars are in all microbatches.
        num_microbatches: How many there are to be, or None if the graph does
            not know it.

    Raises:
        TypeError: If there is a sparse or ragged tensor.
        ValueError: If there are no rows, or several numbers of them.
    """

    def __init__(self, data: Any, num_microbatches: int | None):
        self._structure = data
        self._tensors = [_tensor(each) for each in keras.tree.flatten(data)]
        with_rows = [each for each in self._tensors if _has_rows(each)]
        if not with_rows:
            raise ValueError(
                "A batch must have rows to be cut into microbatches. Received: "
                "data without a tensor that has a dim."
            )
        known = {each.shape[0] for each in with_rows} - {None}
        if len(known) > 1:
            raise ValueError(
                "All tensors of a batch must have one number of rows. "
                f"Received: {sorted(known)}."
            )
        self._num_known = known.pop() if known else None
        self._num_microbatches = num_microbatches
        self.num_rows = tf.shape(with_rows[0])[0]

    @property
    def _even_size(self) -> int | None:
        """Rows of each microbatch, if that is known to be one number."""
        rows = self._num_known
        number = self._num_microbatches
        if not rows or number is None or rows % number:
            return None
        return rows // number

    def microbatch(self, index: tf.Tensor, count: tf.Tensor) -> Any:
        """One of the microbatches, in the structure of the data.

        Args:
            index: Which one, a scalar of int32.
            count: How many there are, a scalar of int32.
        """
        size = self._even_size
        if size is not None:
            begin = index * size
        else:
            begin = self._begin(index, count)
            size = self._begin(index + 1, count) - begin
        return keras.tree.pack_sequence_as(
            self._structure,
            [
                _rows(each, begin, size) if _has_rows(each) else each
                for each in self._tensors
            ],
        )

    def _begin(self, index, count):
        rows, index, count = (
            tf.cast(x, tf.int64) for x in (self.num_rows, index, count)
        )
        return tf.cast(rows * index // count, tf.int32)


def _tensor(value):
    if value is None:
        return None
    if isinstance(value, tf.SparseTensor | tf.RaggedTensor):
        raise TypeError(
            "Batches of dense tensors can be cut into microbatches. Received: "
            f"a {type(value).__name__}. Make it dense (`to_tensor`, "
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
