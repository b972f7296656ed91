"""Tables of text, read in blocks of whole lines.

A file may be larger than the memory. It is read once when its source is
created, a block at a time: where blocks begin, how many rows they have, and
which of their lines are damaged, is kept. Later, each block is read by itself.

`pyarrow.dataset` reads files of text in their own order only, and cannot begin
at a row. So to pyarrow each block is a file of its own.
"""

import re
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfscale.data.sources.source import data_loss
from tfscale.data.sources.table_files import TableBlock
from tfscale.data.sources.table_files import TableFile

_BLOCK_BYTES = 1 << 20  # a line may be longer
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")


class TextBlock(NamedTuple):
    """Whole lines of a file."""

    begin: int
    contents: bytes
    first_line: int  # as editors count, from 1


class Looked(NamedTuple):
    """The rows of some lines, and lines that cannot be read."""

    num_rows: int
    lines: Sequence[bytes] = ()  # needed if one is damaged
    damaged: Mapping[int, str] = {}  # numbers among the lines, and why


def lines_of(contents: bytes) -> list[bytes]:
    """The lines of some bytes, which may be blank, with their ends."""
    return _LINE.findall(contents)


def last_newline(contents: bytes, is_last: bool) -> int:
    """Where the last whole line of some bytes ends.

    `is_last` says whether they are the last of the file.
    """
    return len(contents) if is_last else contents.rfind(b"\n") + 1


def blocks_of(
    path: str,
    end_of: Callable[[bytes, bool], int] = last_newline,
    begin: int = 0,
    line: int = 1,
) -> Iterator[TextBlock]:
    """The blocks of a file from a line on; `end_of` is as `last_newline`."""
    contents = b""
    with tf.io.gfile.GFile(path, "rb") as file:
        file.seek(begin)
        while True:
            more = file.read(_BLOCK_BYTES)
            is_last = len(more) < _BLOCK_BYTES
            contents += more
            end = end_of(contents, is_last)
            if end:
                yield TextBlock(begin, contents[:end], line)
                begin += end
                line += contents.count(b"\n", 0, end)
                contents = contents[end:]
            if is_last:
                return


def scanned(
    kind: str,
    path: str,
    blocks: Iterable[TextBlock],
    look: Callable[[bytes], Looked],
    on_damage: str,
) -> TableFile:
    """The file of some blocks, or the error of its first damaged line."""
    found = []
    for begin, contents, first_line in blocks:
        num_rows, lines, damaged = look(contents)
        if damaged and on_damage == "raise":
            first = min(damaged)
            before = b"".join(lines[:first])
            line = first_line + before.count(b"\n")
            raise data_loss(
                f"A line of a {kind} file cannot be read: {damaged[first]}. "
                f"Received: file {path}, offset {begin + len(before)}, line "
                f"{line}: {lines[first][:80]!r}. "
                "To leave out what cannot be read, use on_damage='skip'."
            )
        found.append(
            TableBlock(begin, len(contents), num_rows, frozenset(damaged))
        )
    return TableFile(path, found)


def read(
    path: str,
    block: TableBlock,
    lines_of: Callable[[bytes], Sequence[bytes]] = lines_of,
) -> bytes:
    """The lines of a block that are not damaged."""
    with tf.io.gfile.GFile(path, "rb") as file:
        file.seek(block.begin)
        contents = file.read(block.size)
    if not block.damaged:
        return contents
    return without(lines_of(contents), block.damaged)


def without(lines: Sequence[bytes], damaged: Iterable[int]) -> bytes:
    """The other lines."""
    left_out = frozenset(damaged)
    return b"".join(
        line for number, line in enumerate(lines) if number not in left_out
    )
