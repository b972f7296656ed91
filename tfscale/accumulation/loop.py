"""The microbatches of all replicas, in one loop.

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
from tfscale.accumulation.replica_step import ReplicaStep


def run_microbatches(step: ReplicaStep, num_microbatches: int) -> None:
    """Runs the microbatches, and sets the step's sums; in replica context.

    A batch with fewer rows than `num_microbatches` has one for each row.
    """
    if not tf.distribute.has_strategy():
        _loop([step], num_microbatches, lambda fn: [fn(0)])
        return
    context = tf.distribute.get_replica_context()
    context.merge_call(_loop_of_all, args=(step, num_microbatches))


def _loop_of_all(strategy, step, num_microbatches):
    # One step per thread, also for model ranks.
    steps = list(getattr(step, "values", (step,)))

    def on_each(fn):
        results = {}

        def call():
            thread = symbols.get_current_replica_id_as_int()
            results[thread] = fn(thread)

        strategy.extended.call_for_each_replica(call)
        return [results[thread] for thread in sorted(results)]

    _loop(steps, num_microbatches, on_each)


def _loop(
    steps: Sequence[ReplicaStep],
    num_microbatches: int,
    on_each: Callable[[Callable], list],
):
    count = tf.clip_by_value(steps[0].most_rows, 1, num_microbatches)
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
