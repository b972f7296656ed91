"""Files of tables as a source: read by blocks of rows, through pyarrow."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.table_layout import TableLayout


def table_blocks(
    kind: str,
    blocks: list[tuple[str, int, int, int]],
    layout: TableLayout,
    read: Callable[[str, int], Any],
    skipped: int,
) -> BlockSource:
    """A source of the rows of blocks, in their order.

    Args:
        kind: What the source is called in errors.
        blocks: Of each block the path of its file, its number there, its rows
            and its bytes.
        layout: How its rows are bytes.
        read: From path and number to a pyarrow table.
        skipped: How many records are damaged, and left out.
    """
    blocks = [block for block in blocks if block[2]]
    ends = tf.constant(np.cumsum([block[2] for block in blocks]), tf.int64)
    paths = tf.constant([block[0] for block in blocks], tf.string)

    def fetch(number):
        path, group, count, _ = blocks[int(number)]
        try:
            rows = layout.rows(read(path, group))
        except ValueError as error:
            raise ValueError(f"{error} File {path}.") from error
        if len(rows) != count:
            raise tf.errors.DataLossError(
                None,
                None,
                "A file must stay as it was when its source was made. "
                f"Received: file {path} with {len(rows)} rows where there were "
                f"{count}.",
            )
        return np.array(rows, object)

    def read_block(number):
        rows = tf.numpy_function(fetch, [number], tf.string, stateful=False)
        # Outside of a graph one string comes without a dimension.
        return tf.data.Dataset.from_tensors(tf.reshape(rows, [-1]))

    def place(record):
        block = tf.searchsorted(ends, record[tf.newaxis], side="right")[0]
        return tf.gather(paths, block), record

    def split(num_workers, worker):
        names = sorted({block[0] for block in blocks})
        shares = [
            [b for b in blocks if b[0] in names[w::num_workers]]
            for w in range(num_workers)
        ]
        sizes = [sum(block[2] for block in share) for share in shares]
        return table_blocks(kind, shares[worker], layout, read, skipped), sizes

    table = np.array([block[2:] for block in blocks], np.int64)
    return BlockSource(
        kind=kind,
        blocks=table.reshape(-1, 2),
        read_block=read_block,
        place=place,
        decode=layout.decode,
        split=split,
        num_skipped=skipped,
    )


class named:
    """What pyarrow cannot read is damaged, and is named."""

    def __init__(self, path: str):
        self._path = path

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        import pyarrow

        if isinstance(error, pyarrow.ArrowException | OSError):
            raise tf.errors.DataLossError(
                None,
                None,
                "A file cannot be read: it is damaged, or of another format. "
                f"Received: file {self._path}: {error}",
            ) from error
