"""`explain`: the time of a pipeline's stages, and what would help most."""

import statistics

import tensorflow as tf

from tfscale.data.chain.resumable_dataset import ResumableDataset
from tfscale.data.chain.resumable_dataset import positions_kept
from tfscale.data.explaining import lints
from tfscale.data.explaining import stages as stages_lib
from tfscale.data.explaining import throughput
from tfscale.data.explaining.explanation import Explanation
from tfscale.data.explaining.explanation import StageTime
from tfscale.data.explaining.explanation import Suggestion

_ROUNDS = 3


def explain(pipeline: tf.data.Dataset, *, seconds: float = 1.0) -> Explanation:
    """Measures a pipeline, stage by stage, and what would make it faster.

    It runs prefixes of the pipeline in turns, each for `seconds` in all,
    because tf.data's own model has one node for all maps of a pipeline. The
    gain of more parallelism or of a cache is computed from these times. The
    gain of prefetching, which comes from bursts, is measured for a consumer
    that is as fast as the pipeline: the median of three rounds, for a quarter
    of `seconds` each. The position is restored. `Throughput`, a callback, says
    whether a model waits for its input.

    Args:
        pipeline: `tf.data.Dataset`; the stages of a `ResumableDataset` are
            those of its recipe, those of any other dataset its transformations.
        seconds: Float, the time of each measurement.

    Returns:
        An `Explanation`; print it for a table.

    Raises:
        ValueError: If the dataset has no batch, or `seconds` is not above 0.

    Example:

    >>> import tensorflow as tf
    >>> dataset = tf.data.Dataset.range(1000).map(lambda x: x + 1).batch(10)
    >>> explanation = explain(dataset, seconds=0.05)
    >>> [stage.name for stage in explanation.stages]
    ['range', 'map', 'batch']
    """
    if seconds <= 0:
        raise ValueError(
            f"`seconds` must be more than 0. Received: seconds={seconds!r}."
        )
    with positions_kept(pipeline):
        return _explained(pipeline, seconds)


def _explained(pipeline, seconds):
    stages, whole = _stage_times(pipeline, seconds)
    suggestions = list(stages_lib.estimates(pipeline, stages))
    change = stages_lib.with_prefetch(pipeline)
    if change is not None:
        text, changed = change
        # A consumer that is as fast as the pipeline: the hardest case.
        consumer = whole.seconds_per_batch
        gain = _gain(pipeline, changed, seconds / 4, consumer)
        suggestions.append(Suggestion(text, gain))
    findings, decisions = [], []
    if isinstance(pipeline, ResumableDataset):  # linted when it was created
        recipe = pipeline.recipe
        how = "batch by batch" if recipe.batchwise else "one by one"
        decisions = [
            f"Records are parsed {how}: {recipe.parse_reason}.",
            f"Cache: {recipe.cache_kind}, {recipe.cache_reason}.",
        ]
    else:
        findings = lints.lint(pipeline)
    return Explanation(
        seconds_per_batch=whole.seconds_per_batch,
        first_batch_seconds=whole.first_batch_seconds,
        stages=stages,
        suggestions=tuple(sorted(suggestions, key=lambda s: -s.gain)),
        findings=tuple(findings),
        decisions=tuple(decisions),
    )


def _stage_times(pipeline, seconds):
    prefixes = stages_lib.prefixes(pipeline)
    # The last prefix is the whole pipeline.
    datasets = [prefix for _, prefix in prefixes[:-1]] + [pipeline]
    rounds = [
        [throughput.benchmark(d, seconds=seconds / _ROUNDS) for d in datasets]
        for _ in range(_ROUNDS)
    ]
    # Other work on the machine only makes a round slower.
    measured = [
        min(one, key=lambda t: t.seconds_per_batch) for one in zip(*rounds)
    ]
    times, before = [], 0.0
    for (name, _), one in zip(prefixes, measured, strict=True):
        total = one.seconds_per_batch
        times.append(StageTime(name, max(total - before, 0.0), total))
        before = max(total, before)
    return tuple(times), measured[-1]


def _gain(base, changed, seconds, consumer):
    """The rate of a changed dataset divided by that of its base."""
    gains = []
    for number in range(_ROUNDS):
        rates = {}
        for is_base in (True, False) if number % 2 else (False, True):
            measured = throughput.benchmark(
                base if is_base else changed,
                seconds=seconds,
                step_seconds=consumer,
                warm_up_seconds=seconds,
            )
            rates[is_base] = measured.batches_per_second
        gains.append(rates[False] / rates[True])
    return statistics.median(gains)
