"""Batches of records of several lengths, padded to their longest record."""

from typing import Any

import keras
import tensorflow as tf


def batched(
    records: tf.data.Dataset, padding: Any, batch_size: int, whole: bool
) -> tf.data.Dataset:
    """Batches of `(key, record)`, each as long as its longest record.

    `padding` is a number, or a structure like a record; `whole` leaves a
    smaller last batch out.

    Raises:
        ValueError: If a component cannot be padded with its value.
    """
    key, record = records.element_spec
    return records.padded_batch(
        batch_size,
        padding_values=(tf.zeros([], key.dtype), _values(padding, record)),
        drop_remainder=whole,
    )


def _values(padding: Any, record: Any) -> Any:
    if not keras.tree.is_nested(padding):
        number = padding  # one for all components is none for strings
        padding = keras.tree.map_structure(
            lambda spec: "" if spec.dtype == tf.string else number, record
        )
    try:
        keras.tree.assert_same_structure(record, padding)
    except ValueError as error:
        raise ValueError(
            "`padding` must be a number, or a structure like that of a record."
            f" Received: padding={padding!r} for records {record}."
        ) from error
    return keras.tree.map_structure(
        lambda spec, value: _value(value, spec), record, padding
    )


def _value(value: Any, spec: tf.TensorSpec) -> tf.Tensor:
    if spec.shape.rank is not None and spec.shape.is_fully_defined():
        return tf.zeros([], spec.dtype)  # never used
    try:
        return tf.constant(
            bool(value) if spec.dtype == tf.bool else value, spec.dtype
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`padding` must be a value of the dtype of what is padded. "
            f"Received: {value!r} for {spec.dtype.name} of shape {spec.shape}. "
            "Give a structure like a record, with a value for each part."
        ) from error
