"""The microbatches of all replicas, in one loop, and how many there are.

Layers on model ranks and some losses exchange values with other replicas in
each microbatch, which threads cannot do from separate loops. So the replicas
enter one loop, which calls each of them:

    replica 0   trial ─┐   ┌─ microbatch ─┐   ┌─ update
                       ├─ loop            ├───┤
    replica 1   trial ─┘   └─ microbatch ─┘   └─ update

For XLA there may be two loops, one after the other: see `Microbatches`.
"""

from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from tfscale._internals import symbols
from tfscale.step.runners.replica_step import ReplicaStep


class GivenNumber:
    """The user's number; fewer for a batch with fewer rows."""

    def __init__(self, number: int):
        self.number: int | None = number

    def count(self, num_rows: tf.Tensor) -> tf.Tensor:
        """How many microbatches a batch has, a scalar of int32; in a graph."""
        return tf.clip_by_value(num_rows, 1, self.number)


class GivenRows:
    """The smallest number of microbatches with at most `max_rows` rows.

    `number` is None, because it is no constant of the graph.
    """

    def __init__(self, rows: int):
        self.number: int | None = None
        self._rows = rows
        with tf.init_scope(), tf.device("CPU:0"):
            self._largest = symbols.ResourceVariable(
                0, name="tfscale/num_microbatches"
            )

    @property
    def found(self) -> int | None:
        """The number for the largest batch so far; None before the first."""
        return int(self._largest) or None

    def count(self, num_rows: tf.Tensor) -> tf.Tensor:
        """See `GivenNumber`."""
        count = tf.maximum(-(-num_rows // self._rows), 1)
        largest = tf.maximum(self._largest.read_value(), count)
        self._largest.assign(largest, read_value=False)
        return count


def run_microbatches(
    step: ReplicaStep, microbatches: GivenNumber | GivenRows
) -> None:
    """Runs the microbatches, and sets the step's sums; in replica context."""
    if not tf.distribute.has_strategy():
        _loop([step], microbatches, lambda fn: [fn(0)])
        return
    context = tf.distribute.get_replica_context()
    context.merge_call(_loop_of_all, args=(step, microbatches))


def _loop_of_all(strategy, step, microbatches):
    # One step per thread, also for model ranks.
    steps = list(getattr(step, "values", (step,)))

    def on_each(fn):
        results = {}

        def call():
            thread = symbols.get_current_replica_id_as_int()
            results[thread] = fn(thread)

        strategy.extended.call_for_each_replica(call)
        return [results[thread] for thread in sorted(results)]

    _loop(steps, microbatches, on_each)


def _loop(
    steps: Sequence[ReplicaStep],
    microbatches: GivenNumber | GivenRows,
    on_each: Callable[[Callable], list],
):
    count = microbatches.count(steps[0].most_rows)
    index, sums = tf.constant(0), [step.initial for step in steps]
    for more_rows in steps[0].batch.more_rows:

        def body(index, sums, more_rows=more_rows):
            def run(thread):
                step = steps[thread]
                return step.microbatch(index, count, more_rows, sums[thread])

            return index + 1, on_each(run)

        end = steps[0].batch.num_rows % count if more_rows else count
        index, sums = tf.while_loop(
            lambda index, _, end=end: index < end,
            body,
            (index, sums),
            (index.shape, [step.shapes for step in steps]),
            parallel_iterations=1,
        )
    for step, replica_sums in zip(steps, sums):
        step.sums = replica_sums
