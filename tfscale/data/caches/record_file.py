"""What a cache on disk asks of the files that hold its records."""

import abc
from collections.abc import Callable
from collections.abc import Sequence
from contextlib import AbstractContextManager

import tensorflow as tf


class RecordFile(abc.ABC):
    """Records that `write` has written, under their numbers.

    Args:
        directory: String.
        specs: List of `tf.TensorSpec`: a record.
        num_records: Integer.
    """

    def __init__(
        self, directory: str, specs: Sequence[tf.TensorSpec], num_records: int
    ):
        self._directory = directory
        self._specs = specs
        self._num_records = num_records

    @abc.abstractmethod
    def sizes(self) -> dict[str, int]:
        """Bytes that each file must have, by its name."""

    @abc.abstractmethod
    def read(self, index: tf.Tensor) -> list[tf.Tensor]:
        """The parts of records; for tf.data.

        Args:
            index: int64 scalar, or vector for a batch of records.

        Returns:
            List of tensors.
        """

    @classmethod
    @abc.abstractmethod
    def write(
        cls,
        directory: str,
        records: tf.data.Dataset,
        specs: Sequence[tf.TensorSpec],
        disk: Callable[[], AbstractContextManager],
    ) -> int:
        """Writes the files.

        Reading records fails for other reasons than writing, and says so
        itself; so only what writes is done within `disk`.

        Args:
            directory: String, where there is nothing yet.
            records: `tf.data.Dataset` of lists of parts.
            specs: List of `tf.TensorSpec`: a record.
            disk: What everything that writes is done within.

        Returns:
            Integer, how many records there were.
        """

    def _check(self, is_whole, record):
        """An operation that fails, and names the record, if it is damaged."""
        return tf.raw_ops.Assert(
            condition=is_whole,
            data=[
                "A record of a cache is damaged. Received: cache",
                self._directory,
                "record",
                record,
                "Delete that directory.",
            ],
        )
