"""Sources, which builders return: how many records, and how one is read."""

import dataclasses
import inspect
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# Marks a record that could not be read.
DAMAGED = b"\x00tfscale: damaged record 5b0d6b1e7f8a4c52\x00"
_STRING = tf.TensorSpec([], tf.string)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """Records of one kind."""

    kind: str  # the builder's name, for explanations
    # From a record as it is read to the record, where they differ.
    decode: Callable[..., Any] | None = None
    takes_batches: bool = False  # whether `decode` takes batches of them, too
    # From `(num_workers, worker)` to the worker's own source and the sizes of
    # all workers' sources, if there are files to divide.
    split: Callable[[int, int], tuple[Any, list[int]]] | None = None
    in_memory: bool = False  # a cache of unparsed records gains nothing
    class_names: tuple[str, ...] = ()  # if labels are numbers
    num_skipped: int = 0  # damaged records that were left out
    # Bytes that differ for other records, if a few records do not tell.
    identity: Callable[[], bytes] | None = None
    # From `(positions, seed, epoch, shuffle)` to the records at positions of an
    # epoch, which `num_records` counts; None if any order will do.
    order: Callable[..., tf.Tensor] | None = None

    def __post_init__(self):
        # AutoGraph would convert the source's own functions, 50 ms for each.
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if inspect.isfunction(value) or inspect.ismethod(value):
                plain = tf.autograph.experimental.do_not_convert(value)
                object.__setattr__(self, field.name, plain)

    def some(self, count: int) -> tuple[np.ndarray, tf.data.Dataset]:
        """Numbers of some records, and a dataset of them."""
        raise NotImplementedError

    def sample(self, count: int) -> tf.data.Dataset:
        """A dataset of some records that are read at little cost."""
        return self.some(count)[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexedSource(_Source):
    """Records that can be read one by one, in any order, at the same price."""

    num_records: int
    # From an int64 scalar to the record; by default by `gather`.
    read: Callable[[tf.Tensor], Any] = None  # type: ignore[assignment]
    # From an int64 vector to a batch of records, if cheaper than `read`.
    gather: Callable[[tf.Tensor], Any] | None = None
    # A cheaper `decode` whose errors do not name the record.
    quick_decode: Callable[..., Any] | None = None

    def __post_init__(self):
        if self.read is None:
            object.__setattr__(self, "read", self._read_one)
        super().__post_init__()

    def _read_one(self, index):
        batch = self.gather(tf.reshape(tf.cast(index, tf.int64), [1]))
        return tf.nest.map_structure(lambda column: column[0], batch)

    def first(self) -> Any:
        """The first record, as eager tensors."""
        return self.read(tf.constant(0, tf.int64))

    def some(self, count: int) -> tuple[np.ndarray, tf.data.Dataset]:
        """Numbers of some records, spread out, and a dataset of them."""
        numbers = _spread(self.num_records, count)
        return numbers, tf.data.Dataset.from_tensor_slices(numbers).map(
            self.read
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSource(_Source):
    """Records that are read in runs of neighbors."""

    # int64, of shape `(num_blocks, 2)`: the number of records of each block,
    # and their bytes in memory.
    blocks: np.ndarray
    # From the number of a block, an int64 scalar, to a dataset of one element,
    # a batch of its records. Strings that cannot be read are `DAMAGED`.
    read_block: Callable[[tf.Tensor], tf.data.Dataset]
    # From the number of a record to its file and the offset in it, for errors.
    locate: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
    record_spec: Any = _STRING  # of a record as it is read

    @property
    def num_records(self) -> int:
        """Records of all blocks."""
        return int(self.blocks[:, 0].sum())

    @property
    def record_bytes(self) -> float:
        """Mean size of a record as it is read."""
        return int(self.blocks[:, 1].sum()) / max(self.num_records, 1)

    def first(self) -> Any:
        """The first record, as eager tensors."""
        # In a dataset: some operations that read blocks run nowhere else.
        record = self.sample(1).get_single_element()
        if any(t.numpy() == DAMAGED for t in scalar_strings(record, 0)):
            path, offset = self.locate(tf.constant(0, tf.int64))
            raise data_loss(
                "A record cannot be read. Received: file "
                f"{path.numpy().decode()}, offset {int(offset)}. To leave "
                "damaged records out, use on_damage='skip'."
            )
        return record

    def sample(self, count: int) -> tf.data.Dataset:
        """The first records."""
        blocks = tf.data.Dataset.range(len(self.blocks))
        return blocks.flat_map(self.read_block).unbatch().take(count)

    def some(self, count: int) -> tuple[np.ndarray, tf.data.Dataset]:
        """Numbers and records, the first ones of some blocks."""
        filled = np.flatnonzero(self.blocks[:, 0])
        blocks = filled[_spread(len(filled), count)]
        firsts = np.cumsum(self.blocks[:, 0]) - self.blocks[:, 0]
        records = tf.data.Dataset.from_tensor_slices(blocks).flat_map(
            lambda block: self.read_block(block).unbatch().take(1)
        )
        return firsts[blocks], records


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamSource(_Source):
    """Records of a `tf.data.Dataset`, the same in each iteration."""

    num_records: int
    dataset: tf.data.Dataset

    def first(self) -> Any:
        """The first record, as eager tensors."""
        return next(iter(self.dataset.take(1)))

    def some(self, count: int) -> tuple[np.ndarray, tf.data.Dataset]:
        """The first records and their numbers."""
        numbers = np.arange(min(count, self.num_records))
        return numbers, self.dataset.take(count)


Source = IndexedSource | BlockSource | StreamSource


def scalar_strings(record: Any, rank: int) -> list[tf.Tensor]:
    """Strings of a record that are scalars; of a batch of them, `rank` is 1."""
    return [
        tensor
        for tensor in tf.nest.flatten(record)
        if tensor.dtype == tf.string and tensor.shape.rank == rank
    ]


def check_on_damage(on_damage: str) -> None:
    """Refuses what `on_damage` of a builder cannot be."""
    if on_damage not in ("raise", "skip"):
        raise ValueError(
            '`on_damage` must be "raise" or "skip". '
            f"Received: on_damage={on_damage!r}."
        )


def warn_of_skipped(skipped: int, what: str, more: str = "") -> None:
    """Warns of damaged records that a builder has left out."""
    if skipped:
        warnings.warn(
            f"{skipped} damaged {what} are left out{more}.", stacklevel=3
        )


def data_loss(message: str) -> tf.errors.DataLossError:
    """The error of records or files that cannot be read."""
    return tf.errors.DataLossError(None, None, message)


def unreadable(
    count: int, read: Callable[[int, int], Any]
) -> Iterator[tuple[int, Exception]]:
    """Numbers and errors of the records at which `read(first, last)` fails."""
    todo = [(0, count)] if count else []
    while todo:
        first, last = todo.pop()
        try:
            read(first, last)
        except ValueError as error:
            middle = (first + last) // 2
            if last - first == 1:
                yield first, error
            else:
                todo += [(middle, last), (first, middle)]


def split_by_file(
    files: Sequence[Any],
    counts: Sequence[int],
    build: Callable[[Sequence[Any]], Any],
) -> Callable[[int, int], tuple[Any, list[int]]]:
    """The `split` of a source that `build` creates from some of its files.

    `counts` are the numbers of records of the files. If a worker would have no
    record, the worker's source is None.
    """

    def split(num_workers, worker):
        sizes = [sum(counts[w::num_workers]) for w in range(num_workers)]
        share = files[worker::num_workers]
        return (build(share) if all(sizes) else None), sizes

    return split


def from_python(
    function: Callable[[Any], list[np.ndarray]], argument: tf.Tensor, spec: Any
) -> Any:
    """A batch of records that a Python function of `argument` reads.

    The function returns arrays in the order of the flat `spec` of a record.
    """
    flat = tf.nest.flatten(spec)
    columns = tf.numpy_function(
        function, [argument], [column.dtype for column in flat], stateful=False
    )
    # Outside of a graph, a vector of one string loses its dimension.
    shaped = [
        tf.reshape(column, [-1, *one.shape])
        for column, one in zip(columns, flat, strict=True)
    ]
    return tf.nest.pack_sequence_as(spec, shaped)


def of_worker(
    source: Source, shard: str, context: tf.distribute.InputContext
) -> tuple[Source, list[int] | None]:
    """A worker's source and, if files are divided, the sizes of all sources."""
    if shard not in ("records", "files"):
        raise ValueError(
            f'`shard` must be "records" or "files". Received: shard={shard!r}.'
        )
    workers = context.num_input_pipelines
    if shard == "records" or workers == 1:
        return source, None
    if source.split is None:
        raise ValueError(
            "Sharding by files needs a source of several files. Received: "
            f"shard='files' with {source.kind}. Use shard='records'."
        )
    share, sizes = source.split(workers, context.input_pipeline_id)
    if 0 in sizes:
        raise ValueError(
            "Every worker needs its own file with shard='files'. Received: "
            f"{workers} workers; {sizes.count(0)} of them would have no "
            "record. Use shard='records', or write more files."
        )
    return share, sizes


def _spread(size: int, count: int) -> np.ndarray:
    """Up to `count` numbers from 0 to `size - 1`, both ends included."""
    return np.unique(np.linspace(0, size - 1, count).astype(np.int64))
