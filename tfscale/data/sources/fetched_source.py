"""Sources whose library reads records at random, in Python: a batch a call."""

import bisect
import os
import warnings
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.data.sources import file_source
from tfscale.data.sources.source import IndexedSource

# Rows that are looked at to know a dataset again.
_NUM_MARKED = 256


def array_records(
    pattern: file_source.Pattern, *, on_damage: str = "raise"
) -> IndexedSource:
    """Records are those of ArrayRecord files, serialized.

    They are read at random, through `array_record`, which tensorflow-datasets
    brings: an epoch is shuffled as a whole.

    Args:
        pattern: String or path, or a list of them: paths or globs.
        on_damage: `"raise"`, with the file and the record, or `"skip"`: what
            cannot be read is left out, and counted in a warning. That is
            decided before the first step, by reading everything once.

    Returns:
        A source of scalar strings.

    Raises:
        FileNotFoundError: If no file matches.
        tf.errors.DataLossError: If a file is no ArrayRecord file.

    Example:

    >>> import os
    >>> import tempfile
    >>> from array_record.python import array_record_module
    >>> path = os.path.join(tempfile.mkdtemp(), "a.array_record")
    >>> writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    >>> for record in (b"one", b"two"):
    ...     _ = writer.write(record)
    >>> writer.close()
    >>> array_records(path).num_records
    2
    """
    if on_damage not in ("raise", "skip"):
        raise ValueError(
            '`on_damage` must be "raise" or "skip". '
            f"Received: on_damage={on_damage!r}."
        )
    files = [_File(path) for path in file_source.match(pattern)]
    rows = [np.arange(file.num_records) for file in files]
    skipped = 0
    if on_damage == "skip":
        rows = [file.whole() for file in files]
        total = sum(file.num_records for file in files)
        skipped = total - sum(map(len, rows))
    if skipped:
        warnings.warn(
            f"{skipped} damaged records of {len(files)} ArrayRecord files are "
            "left out.",
            stacklevel=2,
        )
    return _of_files(files, rows, skipped)


def hugging_face(
    dataset: Any, columns: Sequence[str] | None = None
) -> IndexedSource:
    """Records are the rows of a `datasets.Dataset` of Hugging Face.

    Args:
        dataset: `datasets.Dataset`, one split, not streamed.
        columns: List of strings, the columns to be read; by default all.

    Returns:
        A source of dicts from column to tensor.

    Raises:
        TypeError: If it cannot be read at random, or a column is no number,
            string or array of one shape.

    Example:

    >>> import datasets
    >>> table = datasets.Dataset.from_dict({"x": [1, 2], "y": ["a", "b"]})
    >>> source = hugging_face(table)
    >>> source.num_records, source.read(1)["y"].numpy()
    (2, b'b')
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "column_names"):
        raise TypeError(
            "`dataset` must be one split of a dataset that is read at random. "
            f"Received: a {type(dataset).__name__}. Choose a split; for what "
            "is streamed there is `tfscale.data.dataset`."
        )
    names = list(dataset.column_names if columns is None else columns)
    rows = dataset.select_columns(names).with_format("numpy")
    first = rows[:1] if len(rows) else {}
    specs = {name: _spec_of(name, first[name][0]) for name in first}

    def fetch(index):
        batch = rows[index.tolist()]
        return [_array(batch[name], specs[name]) for name in names]

    def gather(index):
        found = _call(fetch, index, [specs[name] for name in names])
        return dict(zip(names, found, strict=True))

    def mark():
        """What a cache knows the rows by: how many, and some all over them."""
        step = max(len(rows) // _NUM_MARKED, 1)
        found = fetch(np.arange(0, len(rows), step))
        content = [value.tolist() for value in found]
        return repr((names, len(rows), content)).encode()

    return _indexed("hugging_face", len(rows), gather, mark)


class _File:
    """An ArrayRecord file, opened where it is used."""

    def __init__(self, path):
        self.path = path
        self._reader = None
        if not self._open().ok():
            raise tf.errors.DataLossError(
                None,
                None,
                "An ArrayRecord file must be whole, and closed by its writer. "
                f"Received: file {path}, which is none.",
            )
        self.num_records = self._open().num_records()

    def _open(self):
        if self._reader is None:
            # Takes its time, so only who asks waits.
            from array_record.python import array_record_module

            self._reader = array_record_module.ArrayRecordReader(self.path)
        return self._reader

    def read(self, numbers):
        try:
            return self._open().read([int(number) for number in numbers])
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(
                "A record cannot be read. Received: file "
                f"{self.path}, among records {list(numbers)[:8]}: {error} To "
                "leave damaged records out, use on_damage='skip'."
            ) from error

    def whole(self):
        """Numbers of the records that can be read."""

        def found(numbers):
            try:
                self.read(numbers)
            except ValueError:
                self._reader = None  # it fails for ever after
                if len(numbers) == 1:
                    return []
                middle = len(numbers) // 2
                return found(numbers[:middle]) + found(numbers[middle:])
            return list(numbers)

        return np.array(found(range(self.num_records)), np.int64)


def _of_files(files, rows, skipped):
    ends = np.cumsum([len(own) for own in rows]).tolist()

    def fetch(index):
        found = [b""] * len(index)
        by_file = {}
        for place, record in enumerate(index.tolist()):
            by_file.setdefault(bisect.bisect_right(ends, record), []).append(
                (place, record)
            )
        for number, wanted in by_file.items():
            begin = ends[number] - len(rows[number])
            own = rows[number][[record - begin for _, record in wanted]]
            contents = files[number].read(own)
            for (place, _), value in zip(wanted, contents, strict=True):
                found[place] = value
        return [np.array(found, object)]

    def gather(index):
        return _call(fetch, index, [tf.TensorSpec([], tf.string)])[0]

    def split(num_workers, worker):
        sizes = [
            sum(map(len, rows[w::num_workers])) for w in range(num_workers)
        ]
        own = slice(worker, None, num_workers)
        return _of_files(files[own], rows[own], skipped), sizes

    about = repr([(f.path, os.path.getsize(f.path)) for f in files])
    return _indexed(
        "array_records",
        ends[-1],
        gather,
        about.encode,
        split=split,
        num_skipped=skipped,
    )


def _indexed(
    kind: str,
    num_records: int,
    gather: Callable[[tf.Tensor], Any],
    identity: Callable[[], bytes],
    **kwargs: Any,
) -> IndexedSource:
    def read(index):
        batch = gather(tf.reshape(tf.cast(index, tf.int64), [1]))
        return tf.nest.map_structure(lambda part: part[0], batch)

    return IndexedSource(
        kind=kind,
        num_records=num_records,
        read=read,
        gather=gather,
        identity=identity,
        **kwargs,
    )


def _call(fetch, index, specs):
    parts = tf.numpy_function(
        fetch, [index], [spec.dtype for spec in specs], stateful=False
    )
    # Outside of a graph one string comes without a dimension.
    parts = [
        tf.reshape(part, tf.concat([tf.shape(index), spec.shape], 0))
        for part, spec in zip(parts, specs, strict=True)
    ]
    return [
        tf.ensure_shape(part, [None, *spec.shape])
        for part, spec in zip(parts, specs, strict=True)
    ]


def _spec_of(name, value):
    if isinstance(value, str | bytes):
        return tf.TensorSpec([], tf.string)
    value = np.asarray(value)
    if value.dtype.kind not in "biuf":
        raise TypeError(
            "A column must hold numbers, strings or arrays of one shape. "
            f"Received: {name!r} of {value.dtype}. Leave it out of `columns`, "
            "or make it one with the dataset's `map`."
        )
    return tf.TensorSpec(value.shape, tf.as_dtype(value.dtype))


def _array(column, spec):
    if spec.dtype == tf.string:
        rows = [v.encode() if isinstance(v, str) else bytes(v) for v in column]
        return np.array(rows, object)
    return np.asarray(column, spec.dtype.as_numpy_dtype)
