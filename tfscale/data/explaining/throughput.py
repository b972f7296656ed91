"""The throughput of a dataset, also for a consumer that works on batches."""

import dataclasses
import time

import tensorflow as tf

from tfscale.data.chain.resumable_dataset import positions_kept


@dataclasses.dataclass(frozen=True)
class Throughput:
    """The measurement of `benchmark`.

    Attributes:
        seconds_per_batch: Float, mean over the batches counted.
        first_batch_seconds: Float, until the first batch was there.
        num_batches: Integer, batches counted.

    Example:

    >>> Throughput(0.01, 0.5, 20).batches_per_second
    100.0
    """

    seconds_per_batch: float
    first_batch_seconds: float
    num_batches: int

    @property
    def batches_per_second(self) -> float:
        """Float."""
        return 1.0 / self.seconds_per_batch


def benchmark(
    dataset: tf.data.Dataset,
    *,
    seconds: float = 2.0,
    step_seconds: float = 0.0,
    warm_up_seconds: float = 0.0,
) -> Throughput:
    """Measures how fast a dataset gives batches.

    The first batch, with which everything starts, is measured alone. A dataset
    that ends is begun again, and that time counts. The positions of all
    `ResumableDataset`s in it are restored.

    Args:
        dataset: `tf.data.Dataset`.
        seconds: Float, how long to measure.
        step_seconds: Float, the time for which a consumer sleeps with each
            batch, as a host does while an accelerator computes.
        warm_up_seconds: Float, the time before the measurement, in which the
            buffers of autotuning grow.

    Returns:
        A `Throughput`.

    Raises:
        ValueError: If the dataset has no batch, also the second time, or a time
            makes no sense.

    Example:

    >>> import tensorflow as tf
    >>> dataset = tf.data.Dataset.range(1000).batch(10)
    >>> benchmark(dataset, seconds=0.1).num_batches > 0
    True
    """
    if seconds <= 0 or step_seconds < 0 or warm_up_seconds < 0:
        raise ValueError(
            "`seconds` must be more than 0, and the others not less. Received: "
            f"seconds={seconds!r}, step_seconds={step_seconds!r}, "
            f"warm_up_seconds={warm_up_seconds!r}."
        )
    with positions_kept(dataset):
        return _measured(dataset, seconds, step_seconds, warm_up_seconds)


def _measured(dataset, seconds, step_seconds, warm_up_seconds):
    begin = time.perf_counter()
    iterator = iter(dataset)
    if next(iterator, None) is None:
        raise ValueError("A dataset without a batch has no throughput.")
    first = time.perf_counter() - begin
    for duration in (warm_up_seconds, seconds):
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < duration or not count:
            if next(iterator, None) is None:
                iterator = iter(dataset)
                if next(iterator, None) is None:
                    raise ValueError(
                        "A dataset must restart when it ends to be measured. "
                        "Received: a dataset that was empty the second time, "
                        "like one of an exhausted generator. Create the "
                        "generator anew for each iteration."
                    )
            count += 1
            if step_seconds:
                time.sleep(step_seconds)
        elapsed = time.perf_counter() - begin
    return Throughput(elapsed / count, first, count)
