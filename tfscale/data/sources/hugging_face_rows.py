"""What rows of Hugging Face hold, as bytes: columns, arrays and images.

Not through the arrays that they make for NumPy: those make float64 float32, a
missing integer the smallest one, and take zeros off the ends of bytes.

Where all rows of a column have arrays of one shape, which is seen before the
first step, they travel as numbers of a known length, in batches. Else what is
more than a vector travels as one, with its shape beside it:

    image of shape (2, 3, 3)  ->  18 numbers, and 2 3 3  ->  decode  ->  image
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.data.sources import arrow_values
from tfscale.data.sources.table_layout import TableLayout


class ArrayRows:
    """Rows of a table, and of columns of arrays beside it, as bytes.

    Args:
        names: Strings, all columns.
        table: Pyarrow table of the first row's plain columns.
        arrays: Dict from each other column to a list of the first row's array.
        fixed: Dict from columns of the table whose numbers are arrays of one
            shape to that.
    """

    def __init__(
        self,
        names: Sequence[str],
        table: Any,
        arrays: Mapping[str, list[np.ndarray]],
        fixed: Mapping[str, Sequence[int]],
    ):
        self._names = list(names)
        self._fixed = dict(fixed)
        self._likes = {name: found[0] for name, found in arrays.items()}
        self._layout = TableLayout(self._joined(table, arrays).schema, None)

    def rows(
        self, table: Any, arrays: Mapping[str, list[np.ndarray]]
    ) -> list[bytes]:
        """The bytes of rows like the first one."""
        return self._layout.rows(self._joined(table, arrays))

    def decode(self, row: tf.Tensor) -> dict[str, tf.Tensor]:
        """The columns of a row."""
        record = self._layout.decode(row)
        for name, shape in self._fixed.items():
            record[name] = tf.reshape(record[name], shape)
        for name, like in self._likes.items():
            array = tf.reshape(record[name], record[_shape_of(name)])
            array.set_shape([None] * like.ndim)
            record[name] = array
        return {name: record[name] for name in self._names}

    def _joined(self, table, arrays):
        import pyarrow

        fields, columns = list(table.schema), list(table.columns)
        for name, found in arrays.items():
            for array in found:
                _check_like(self._likes[name], array, name)
            parts = zip((name, _shape_of(name)), _flat(found), strict=True)
            for called, part in parts:
                fields.append(pyarrow.field(called, part.type))
                columns.append(part)
        return pyarrow.table(columns, pyarrow.schema(fields))


class ArrowRows:
    """Rows of Hugging Face's own tables, as bytes.

    Args:
        names: Strings, the columns to be read.
        features: `datasets.Features`, of these at least.
        first: Pyarrow table of the first row.
        whole: Pyarrow table of all rows, or None if nobody has it.
    """

    def __init__(
        self, names: Sequence[str], features: Any, first: Any, whole: Any
    ):
        readers = {name: _reader(name, features[name]) for name in names}
        shapes = {
            name: _shape_of_all(whole.column(name))
            for name in names
            if whole is not None
        }
        self._fixed = {name: shape for name, shape in shapes.items() if shape}
        self._readers = {
            name: read
            for name, read in readers.items()
            if read and name not in self._fixed
        }
        table, arrays = self._parts(first, [0])
        self._array_rows = ArrayRows(names, table, arrays, self._fixed)
        self.decode = self._array_rows.decode

    def rows(self, table: Any, numbers: Sequence[int]) -> list[bytes]:
        """The bytes of rows of given numbers."""
        return self._array_rows.rows(*self._parts(table, numbers))

    def _parts(self, table, numbers):
        for name, shape in self._fixed.items():
            field, column = _of_one_size(name, table[name], math.prod(shape))
            place = table.column_names.index(name)
            table = table.set_column(place, field, column)
        arrays = {
            name: [
                read(table[name].slice(at, 1), number)
                for at, number in enumerate(numbers)
            ]
            for name, read in self._readers.items()
        }
        return table.drop_columns(list(arrays)), arrays


def _reader(name, feature):
    """Function from a column of one row to its array; None for plain values."""
    import datasets
    import pyarrow

    kind = datasets.Features({name: feature}).arrow_schema.field(name).type
    if isinstance(feature, datasets.Image) and feature.decode:
        return _image_reader(name, feature)
    if arrow_values.is_plain(kind):
        return None
    if isinstance(kind, pyarrow.ExtensionType):
        kind = kind.storage_type
    leaf = kind
    while arrow_values.is_list(leaf):
        leaf = leaf.value_type
    dtype = arrow_values.number_dtype(leaf)
    if not arrow_values.is_list(kind) or dtype is None:
        raise TypeError(
            "A column must hold numbers, strings, arrays of numbers or images."
            f" Received: {name!r} of {kind}. Leave it out of `columns`, or "
            "make it one with the dataset's `map`."
        )
    return _nested_reader(name, dtype)


def _image_reader(name, feature):
    def read(column, number):
        value = column.to_pylist()[0]
        if value is None:
            raise _missing(name, number)
        try:
            return np.asarray(feature.decode_example(value))
        except OSError as error:
            raise ValueError(
                f"An image cannot be decoded. Received: column {name!r}, row "
                f"{number}: {error}. Leave such rows out with the dataset's "
                "`filter`."
            ) from error

    return read


def _nested_reader(name, dtype):
    from pyarrow import compute

    def read(column, number):
        column = _stored(column)
        shape = []
        while arrow_values.is_list(column.type):
            lengths = set(compute.list_value_length(column).to_pylist())
            if None in lengths:
                raise _missing(name, number)
            if len(lengths) > 1:
                raise ValueError(
                    "Lists within a row must be of one length, an array. "
                    f"Received: column {name!r}, row {number}: lengths "
                    f"{sorted(lengths)}. Pad them with the dataset's `map`."
                )
            shape.append(max(lengths, default=0))
            column = compute.list_flatten(column)
        return arrow_values.numbers(column, dtype).reshape(shape)

    return read


def _stored(column):
    """A column of lists, also where it is one of Hugging Face's arrays."""
    import pyarrow

    if not isinstance(column.type, pyarrow.ExtensionType):
        return column
    return pyarrow.chunked_array([chunk.storage for chunk in column.chunks])


def _shape_of_all(column):
    """The shape that the lists of all rows have, or None."""
    from pyarrow import compute

    column, shape = _stored(column), []
    while arrow_values.is_list(column.type):
        lengths = compute.list_value_length(column)
        ends = compute.min_max(lengths).as_py()
        if lengths.null_count or not ends["max"] or ends["min"] != ends["max"]:
            return None
        shape.append(ends["max"])
        column = compute.list_flatten(column)
    # The leaves of others, such as strings, are refused or read as they are.
    return shape if arrow_values.number_dtype(column.type) else None


def _of_one_size(name, column, size):
    """A column of so many numbers in each row, and its field."""
    import pyarrow
    from pyarrow import compute

    column = _stored(column)
    while arrow_values.is_list(column.type):
        column = compute.list_flatten(column)
    dtype = arrow_values.number_dtype(column.type)
    values = pyarrow.array(arrow_values.numbers(column, dtype))
    lists = pyarrow.FixedSizeListArray.from_arrays(values, size)
    return pyarrow.field(name, lists.type, nullable=False), lists


def _missing(name, number):
    return ValueError(
        "Every row must have its array or image. Received: column "
        f"{name!r}, row {number}, which has none. Leave such rows out with "
        "the dataset's `filter`."
    )


def _check_like(first, array, name):
    """Refuses an array that is not as the first one, but for its sizes."""
    if array.ndim != first.ndim or array.dtype != first.dtype:
        raise ValueError(
            "Arrays of a column must be of one dtype and number of dimensions."
            f" Received: {name!r} with {array.dtype} of shape {array.shape} "
            f"and {first.dtype} of shape {first.shape}. Make them so with the "
            "dataset's `map`, images by "
            f"`cast_column({name!r}, datasets.Image(mode='RGB'))`."
        )


def _flat(arrays):
    """Columns of vectors, and of their shapes."""
    import pyarrow

    ends = np.cumsum([0, *(array.size for array in arrays)])
    values = np.concatenate([array.reshape(-1) for array in arrays])
    flat = pyarrow.LargeListArray.from_arrays(ends, pyarrow.array(values))
    shapes = [array.shape for array in arrays]
    return flat, pyarrow.array(shapes, pyarrow.list_(pyarrow.int32()))


def _shape_of(name):
    return f"{name} (shape)"
