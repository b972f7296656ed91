"""What a pyarrow column holds, and its values for TensorFlow."""

from typing import Any

import numpy as np


def is_plain(kind: Any) -> bool:
    """Whether columns of a pyarrow type can be written."""
    kind = plain(kind)
    flat = kind.value_type if is_list(kind) else kind
    return is_string(kind) or number_dtype(flat) is not None


def plain(kind: Any) -> Any:
    """The type of the values, where they are numbered in a dictionary."""
    import pyarrow

    return kind.value_type if pyarrow.types.is_dictionary(kind) else kind


def number_dtype(kind: Any) -> np.dtype | None:
    """The dtype of numbers, booleans and times; of others None."""
    import pyarrow

    types = pyarrow.types
    if is_time(kind):
        return np.dtype(f"i{kind.bit_width // 8}")
    if types.is_boolean(kind):
        return np.dtype(np.bool_)
    if types.is_integer(kind) or types.is_floating(kind):
        return np.dtype(kind.to_pandas_dtype())
    return None


def is_time(kind: Any) -> bool:
    """Whether a pyarrow type is one of dates or times: stored as integers."""
    return _is_any(kind, "date", "time", "timestamp", "duration")


def is_string(kind: Any) -> bool:
    """Whether a pyarrow type is one of strings, of text or bytes."""
    return _is_any(kind, "string", "large_string", "binary", "large_binary")


def is_list(kind: Any) -> bool:
    """Whether a pyarrow type is one of lists, of whatever."""
    return _is_any(kind, "list", "large_list", "fixed_size_list")


def _is_any(kind, *names):
    import pyarrow

    return any(getattr(pyarrow.types, f"is_{name}")(kind) for name in names)


def numbers(column: Any, dtype: np.dtype) -> np.ndarray:
    """Numbers of a pyarrow column, with 0 or NaN for what is missing."""
    column = column.cast(plain(column.type)).combine_chunks()
    if is_time(column.type):
        column = column.view(f"int{column.type.bit_width}")
    if dtype.kind != "f":
        column = column.fill_null(False if dtype.kind == "b" else 0)
    return column.to_numpy(zero_copy_only=False).astype(dtype)


def strings(column: Any) -> list[bytes]:
    """Strings of a pyarrow column, with "" for what is missing."""
    values = column.cast(plain(column.type)).to_pylist()
    return [
        value.encode() if isinstance(value, str) else value or b""
        for value in values
    ]
