"""Arrays in memory as a source."""

import hashlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.data.packing import Packing
from tfscale.data.sources.source import IndexedSource

_INT32 = np.iinfo(np.int32)


def arrays(*components: Any) -> IndexedSource:
    """Records are the rows of arrays.

    Args:
        *components: Arrays, or tuples and dicts of arrays, that agree in their
            first dimension; typically `x, y` or `x, y, sample_weight`. A list
            is an array, as for `tf.data`.

    Returns:
        A source whose records are tuples of rows, or a row if one component
        is given.

    Raises:
        TypeError: If something is no array of numbers or strings.
        ValueError: If lengths differ, or there is no array.

    Example:

    >>> import numpy as np
    >>> source = arrays(np.zeros((10, 3)), np.arange(10))
    >>> source.num_records
    10
    """
    tensors = _tensors(components)
    flat = tf.nest.flatten(tensors)
    lengths = [int(t.shape[0]) if t.shape.rank else None for t in flat]
    if not lengths or len(set(lengths)) > 1 or lengths[0] is None:
        raise ValueError(
            "All arrays must have the same first dimension. Received: shapes "
            f"{[tuple(t.shape) for t in flat]}."
        )
    structure = tensors if len(tensors) > 1 else tensors[0]
    packing = Packing(
        keras.tree.map_structure(
            lambda t: tf.TensorSpec(t.shape[1:], t.dtype), structure
        )
    )
    with tf.device("CPU:0"):
        packed = packing.pack(structure)

    def gather(index):
        return packing.unpack([tf.gather(t, index) for t in packed])

    return IndexedSource(
        kind="arrays",
        num_records=lengths[0],
        read=gather,
        gather=gather,
        in_memory=True,
        identity=lambda: b"".join(map(digest, packed)),
    )


def _tensors(component):
    if isinstance(component, tuple):
        plain = type(component) is tuple
        tensors = map(_tensors, component)
        return tuple(tensors) if plain else type(component)(*tensors)
    if isinstance(component, dict):
        return {key: _tensors(value) for key, value in component.items()}
    try:
        return tf.convert_to_tensor(component)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "Arrays must be dense, of numbers or strings. Received: a "
            f"{type(component).__name__}, which is no tensor: {error} Pad rows "
            "of different lengths, and omit a missing argument."
        ) from error


def check_tokens(row: np.ndarray, where: str) -> None:
    """Refuses integers that are no tokens: below 0, or above int32."""
    if row.size and not 0 <= row.min() <= row.max() <= _INT32.max:
        raise ValueError(
            "Tokens must be integers of 32 bits from 0 on. Received: "
            f"{where} with {row.min()} to {row.max()}."
        )


def digest(tensor: tf.Tensor) -> bytes:
    """A hash of the values of a tensor."""
    values = tensor.numpy()
    if values.dtype == object:  # strings
        values = np.frombuffer(tf.io.serialize_tensor(tensor).numpy(), np.uint8)
    rows = np.ascontiguousarray(values).view(np.uint8)
    return hashlib.blake2b(rows.data).digest()
