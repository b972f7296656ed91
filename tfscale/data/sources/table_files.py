"""Files of tables as sources, read in blocks of rows."""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.data.sources import file_blocks
from tfscale.data.sources.row_format import RowFormat
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.source import data_loss
from tfscale.data.sources.source import from_python


@dataclasses.dataclass(frozen=True)
class TableBlock:
    """Neighboring rows of a file."""

    begin: int  # an offset in the file, or a number there
    size: int  # bytes
    num_rows: int
    damaged: frozenset[int] = frozenset()  # lines that are left out


@dataclasses.dataclass(frozen=True)
class TableFile:
    """A file, its blocks in order, and its size in bytes."""

    path: str
    blocks: Sequence[TableBlock]
    size: int = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "size", _size(self.path))

    @property
    def num_damaged(self) -> int:
        """Lines that are left out."""
        return sum(len(block.damaged) for block in self.blocks)


def _size(path):
    return tf.io.gfile.stat(path).length


def source_of(
    kind: str,
    files: Sequence[TableFile],
    rows: RowFormat,
    read: Callable[[str, TableBlock], list[np.ndarray]],
    record: Callable[[dict[str, Any]], Any] = lambda row: row,
) -> BlockSource:
    """A source of the rows of files, in their order.

    `read` returns the packed rows of a block; `record` makes a record of a
    row's dict.
    """
    filled = [file for file in files if any(b.num_rows for b in file.blocks)]
    paths = [file.path for file in filled]
    blocks = {
        (number, block.begin): block
        for number, file in enumerate(filled)
        for block in file.blocks
        if block.num_rows
    }

    def fetch(where):
        number, begin = where.tolist()
        file, block = filled[number], blocks[number, begin]
        rule = "A file must not change after its source was created. Received"
        if (size := _size(file.path)) != file.size:
            raise data_loss(
                f"{rule}: file {file.path} with {size} bytes where there were "
                f"{file.size}."
            )
        try:
            arrays = read(file.path, block)
        except ValueError as error:
            raise ValueError(f"{error} File {file.path}.") from error
        if len(arrays[0]) != block.num_rows:
            raise data_loss(
                f"{rule}: file {file.path} with {len(arrays[0])} rows where "
                f"there were {block.num_rows}."
            )
        return arrays

    def read_block(block):
        where = tf.stack([block.file, block.begin])
        return tf.data.Dataset.from_tensors(
            from_python(fetch, where, rows.spec)
        )

    return file_blocks.source_of_files(
        kind,
        filled,
        paths,
        [
            (number, block.num_rows, begin, block.size)
            for (number, begin), block in blocks.items()
        ],
        read_block,
        lambda share: source_of(kind, share, rows, read, record),
        record_spec=rows.spec,
        decode=lambda *row: record(rows.decode(*row)),
        takes_batches=rows.takes_batches,
        num_skipped=sum(file.num_damaged for file in files),
    )
