"""`explain`: the time of a pipeline's stages, and what would help most."""

import statistics
import time

import keras
import tensorflow as tf

from tfscale.data.chain.resumable_dataset import ResumableDataset
from tfscale.data.chain.resumable_dataset import positions_kept
from tfscale.data.explaining import lints
from tfscale.data.explaining import stages as stages_lib
from tfscale.data.explaining import throughput
from tfscale.data.explaining.explanation import Explanation
from tfscale.data.explaining.explanation import StageTime
from tfscale.data.explaining.explanation import Suggestion

_MIN_STEPS = 5
_MANY_STEPS = 1_000_000  # `fit` ends earlier
_ROUNDS = 3


def explain(
    pipeline: tf.data.Dataset,
    model: keras.Model | None = None,
    *,
    seconds: float = 1.0,
) -> Explanation:
    """Measures a pipeline, stage by stage, and what would make it faster.

    It runs prefixes of the pipeline in turns, each for `seconds` in all, and
    the model's own step on one batch over and over, because tf.data's own
    model has one node for all maps of a pipeline. The gain of more parallelism
    or of a cache is computed from these times. The gain of prefetching, which
    comes from bursts, is measured: the median of three rounds, against the
    pipeline as it is, for a quarter of `seconds` each. Weights, optimizer,
    metrics and position are restored.

    Args:
        pipeline: `tf.data.Dataset`; the stages of a `ResumableDataset` are
            those of its recipe, those of any other dataset its transformations.
        model: Compiled `keras.Model`, or None.
        seconds: Float, the time of each measurement.

    Returns:
        An `Explanation`; print it for a table.

    Raises:
        ValueError: If the model is not compiled, the dataset has no batch, or
            `seconds` is not above 0.

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
    if model is not None and not model.compiled:
        raise ValueError(
            "The model must be compiled, because the step of `fit` is "
            f"measured. Received: {model.name!r}, which is not. Call its "
            "`compile` first, or omit the model."
        )
    with positions_kept(pipeline):
        return _explained(pipeline, model, seconds)


def _explained(pipeline, model, seconds):
    stages, whole = _stage_times(pipeline, seconds)
    step = None if model is None else _step_seconds(model, pipeline, seconds)
    # Without a model, a consumer as fast as the pipeline: the hardest case.
    consumer = step or whole.seconds_per_batch
    suggestions = list(stages_lib.estimates(pipeline, stages))
    change = stages_lib.with_prefetch(pipeline)
    if change is not None:
        text, changed = change
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
        step_seconds=step,
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


class _StepTimes(keras.callbacks.Callback):
    """Times each step, and ends `fit` after enough of them."""

    def __init__(self, seconds):
        super().__init__()
        self.times = []
        self._seconds = seconds

    def on_train_batch_begin(self, batch, logs=None):
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.perf_counter() - self._begin)
        times = self.times[1:]  # the first one traces
        if len(times) >= _MIN_STEPS and sum(times) >= self._seconds:
            self.model.stop_training = True


def _step_seconds(model, pipeline, seconds):
    """The model's own step in `fit`, on one batch over and over."""
    batch = next(iter(pipeline))
    with model.distribute_strategy.scope():
        if not model.built:
            # Creates the weights, changes none.
            model.test_on_batch(
                *(batch if isinstance(batch, tuple) else [batch])
            )
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    before = [keras.ops.convert_to_numpy(v) for v in variables]
    stop, history = model.stop_training, getattr(model, "history", None)
    steps = _StepTimes(seconds)
    batches = tf.data.Dataset.from_tensors(batch).cache().repeat()
    model.fit(
        batches, steps_per_epoch=_MANY_STEPS, callbacks=[steps], verbose=0
    )
    model.stop_training, model.history = stop, history
    with model.distribute_strategy.scope():
        for variable, value in zip(variables, before):
            variable.assign(value)
        model.reset_metrics()
    return statistics.median(steps.times[1:])
