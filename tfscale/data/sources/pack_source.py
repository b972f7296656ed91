"""Documents packed into sequences of one length, none attending to another.

    tokens       a a a a a b b b . .    documents, one after another
    segments     1 1 1 1 1 2 2 2 0 0    the document's number; 0: padding
    positions    0 1 2 3 4 0 1 2 0 0    index within the document

If each document had its own sequence, most of a batch would be padding. If
documents were cut at the end of each window, a document would follow another in
its context. Packing avoids both (Krell et al., "Efficient Sequence Packing
without Cross-contamination", 2021; first-fit as in Grain).
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.data.sources import array_source
from tfscale.data.sources.source import IndexedSource
from tfscale.integers import check_integer

_OPEN = 64  # sequences that a document may still be put into


@dataclasses.dataclass(frozen=True)
class PackedSource(IndexedSource):
    """The source that `pack` returns.

    Attributes:
        utilization: Float, the share of positions that hold a token.
        num_documents: Integer, documents that have a token here.

    Example:

    >>> pack([[1, 2, 3], [4, 5]], length=4).num_documents
    2
    """

    utilization: float = 0.0
    num_documents: int = 0


def pack(
    documents: Iterable[Any], length: int, *, num_open: int = _OPEN
) -> PackedSource:
    """Sequences of one length that hold whole documents, for language models.

    A model learns each token from those before it in the document. A document
    of n tokens takes n - 1 positions of a sequence; a longer one than `length`
    is cut into pieces, each its own segment. A document goes into the first
    open sequence that has room for it; if none has, the fullest is closed.

    Args:
        documents: Rows of integers: lists, arrays or tensors, of any lengths.
            Documents of fewer than two tokens are left out.
        length: Integer, positions of a sequence.
        num_open: Integer, sequences that are filled at the same time. More of
            them waste less.

    Returns:
        A source of `(x, y, sample_weight)`: x is a dict of `"tokens"`,
        `"segment_ids"`, which count from 1 and are 0 for padding, and
        `"positions"`; y are the tokens that follow. All are int32 of shape
        `(length,)`; the weights are float32, 0 for padding. Give
        `packed_attention_mask(x["segment_ids"])` to attention layers.

    Raises:
        ValueError: If there is no document, one is no row of integers of 32
            bits, or a number is not 1 or more.

    Example:

    >>> source = pack([[1, 2, 3], [4, 5], [6, 7, 8, 9]], length=4)
    >>> x, y, weight = source.read(0)
    >>> x["tokens"].numpy().tolist(), y.numpy().tolist()
    ([1, 2, 4, 0], [2, 3, 5, 0])
    >>> x["segment_ids"].numpy().tolist(), x["positions"].numpy().tolist()
    ([1, 1, 2, 0], [0, 1, 0, 0])
    >>> source.num_records, source.utilization
    (2, 0.75)
    """
    check_integer("length", length)
    check_integer("num_open", num_open)
    rows = [_row(number, one) for number, one in enumerate(documents)]
    rows = [row for row in rows if len(row) > 1]
    if not rows:
        raise ValueError(
            "`documents` must be rows of integers, and one of them of two or "
            "more. Received: none of two or more tokens."
        )
    begins, sizes = _pieces(rows, length)
    order, splits = _first_fit(sizes, length, num_open)
    tokens = tf.constant(np.concatenate(rows))
    gather = _reader(tokens, begins[order], sizes[order], splits, length)
    count = len(splits) - 1

    return PackedSource(
        kind="pack",
        num_records=count,
        gather=gather,
        in_memory=True,
        identity=lambda: array_source.digest(tokens) + splits.tobytes(),
        utilization=float(sizes.sum() / (count * length)),
        num_documents=len(rows),
    )


def packed_attention_mask(segment_ids: Any) -> Any:
    """The mask with which positions of one document attend to each other.

    For the `attention_mask` of Keras' attention layers, in a model or outside;
    `use_causal_mask=True` also hides later positions.

    Args:
        segment_ids: Integer tensor of shape `(batch, length)`, of `pack`.

    Returns:
        Bool tensor of shape `(batch, length, length)`.

    Example:

    >>> import numpy as np
    >>> np.array(packed_attention_mask(np.array([[1, 1, 2]])))[0].astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])
    """
    here = keras.ops.expand_dims(segment_ids, 2)
    others = keras.ops.expand_dims(segment_ids, 1)
    return keras.ops.equal(here, others)


def _row(number, document):
    row = np.asarray(document)
    if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
        raise ValueError(
            "`documents` must be rows of integers. Received: document "
            f"{number} of {row.dtype} and shape {row.shape}."
        )
    array_source.check_tokens(row, f"document {number}")
    return row.astype(np.int32)


def _pieces(rows, length):
    """Where pieces of documents begin, and how many positions they take."""
    begins, sizes, at = [], [], 0
    for row in rows:
        for first in range(0, len(row) - 1, length):
            begins.append(at + first)
            sizes.append(min(length, len(row) - 1 - first))
        at += len(row)
    return np.array(begins, np.int64), np.array(sizes, np.int64)


def _first_fit(sizes, length, num_open):
    """The pieces in the order of the sequences, and where each begins."""
    room = np.full(num_open, length)
    held = [[] for _ in range(num_open)]
    closed = []
    for number, size in enumerate(sizes):
        sequence = int(np.argmax(room >= size))
        if room[sequence] < size:
            sequence = int(np.argmin(room))  # the fullest
            closed.append(held[sequence])
            held[sequence], room[sequence] = [], length
        held[sequence].append(number)
        room[sequence] -= size
    closed += [one for one in held if one]
    splits = np.cumsum([0, *map(len, closed)])
    return np.concatenate(closed).astype(np.int64), splits.astype(np.int64)


def _reader(tokens, begins, sizes, splits, length):
    """A function from numbers of sequences to a batch of them."""
    begins, sizes, splits = map(tf.constant, (begins, sizes, splits))

    def gather(index):
        pieces = tf.ragged.range(
            tf.gather(splits, index), tf.gather(splits, index + 1)
        )
        begin = tf.gather(begins, pieces.values)
        size = tf.gather(sizes, pieces.values)
        indices = tf.ragged.range(begin, begin + size)
        # The end of the tokens of each sequence.
        ends = tf.gather(tf.cumsum(size), pieces.row_limits() - 1)
        limits = tf.concat([[0], ends], 0)
        number = tf.ragged.range(1, pieces.row_lengths() + 1).values

        def row(values):
            ragged = tf.RaggedTensor.from_row_splits(
                tf.cast(values, tf.int32), limits, validate=False
            )
            return ragged.to_tensor(shape=[None, length])

        segments = row(tf.repeat(number, size))
        x = {
            "tokens": row(tf.gather(tokens, indices.values)),
            "segment_ids": segments,
            "positions": row(tf.ragged.range(size).values),
        }
        y = row(tf.gather(tokens, indices.values + 1))
        return x, y, tf.cast(segments > 0, tf.float32)

    return gather
