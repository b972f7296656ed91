"""Nested values as JSON, and their arrays; nothing is unpickled."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import numpy as np

_ARRAY = "__array__"
_PLAIN = (bool, int, float, str, type(None))


def split(value: Any, key: str) -> tuple[Any, dict[str, np.ndarray]]:
    """JSON of a nested value, and its arrays by key.

    Args:
        value: Numbers, strings, None, arrays; lists, tuples and dicts of them.
            Tuples come back as lists.
        key: Beginning of the arrays' keys.

    Raises:
        TypeError: If there is anything else in it; says where.
    """
    arrays: dict[str, np.ndarray] = {}
    return _split(value, key, arrays), arrays


def _split(value, path, arrays):
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {
            str(k): _split(v, f"{path}/{k}", arrays) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_split(v, f"{path}/{i}", arrays) for i, v in enumerate(value)]
    if isinstance(value, np.ndarray) or hasattr(value, "numpy"):
        arrays[path] = np.asarray(value)
        return {_ARRAY: path}
    raise TypeError(
        "A state must be of numbers, strings, None and arrays, in lists and "
        f"dicts. Received: {type(value).__name__} at {path!r}."
    )


def join(value: Any, read: Callable[[str], np.ndarray]) -> Any:
    """The nested value from which `split` made the JSON."""
    if isinstance(value, dict):
        if set(value) == {_ARRAY}:
            return read(value[_ARRAY])
        return {k: join(v, read) for k, v in value.items()}
    if isinstance(value, list):
        return [join(v, read) for v in value]
    return value
