"""Mistakes that cost speed or reproducibility, found before the first step."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale.graphs.dataset_graph import stages_of

_BATCHES = ("Batch", "MapAndBatch", "PaddedBatch", "ParallelBatch")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One mistake.

    Attributes:
        rule: String, a short name: `"cache-after-random"`,
            `"shuffle-after-batch"`, `"python-function"`, `"stateful-random"` or
            `"unstable-order"`.
        message: String: what is wrong.
        fix: String: what to do.

    Example:

    >>> str(Finding("rule", "It is wrong.", "Mend it."))
    'rule: It is wrong. Mend it.'
    """

    rule: str
    message: str
    fix: str

    def __str__(self):
        return f"{self.rule}: {self.message} {self.fix}"


def lint(dataset: tf.data.Dataset) -> list[Finding]:
    """Looks for mistakes in a `tf.data.Dataset` without running it.

    Args:
        dataset: `tf.data.Dataset`.

    Returns:
        A list of `Finding`.

    Example:

    >>> import tensorflow as tf
    >>> dataset = tf.data.Dataset.range(9).batch(3).shuffle(3)
    >>> [finding.rule for finding in lint(dataset)]
    ['shuffle-after-batch']
    """
    findings = []
    random, batched = {}, {}  # by stage: random operations and batching so far
    for stage in stages_of(dataset):
        drawn = [op for one in stage.inputs for op in random[one]]
        in_batches = any(batched[one] for one in stage.inputs)
        findings.extend(_of_functions(stage))
        if stage.is_a("Cache") and drawn:
            findings.append(_cached(drawn))
        if stage.is_a("Shuffle") and in_batches:
            findings.append(_shuffled_late())
        random[stage] = drawn + stage.random
        if stage.is_a(*_BATCHES):
            in_batches = True
        batched[stage] = in_batches and not stage.is_a("Unbatch")
    return findings


def lint_order(dataset: tf.data.Dataset) -> list[Finding]:
    """Looks for shuffles that change the order with each iteration."""
    return [
        Finding(
            "unstable-order",
            "Each iteration shuffles the dataset again, so no position in it "
            "can be found again.",
            "Leave out its `shuffle`; `tfscale.data.pipeline` shuffles.",
        )
        for stage in stages_of(dataset)
        if stage.is_a("Shuffle") and stage.settings["reshuffle_each_iteration"]
    ]


def check_functions(
    dataset: tf.data.Dataset, augment: Callable[..., Any] | None
) -> None:
    """Checks the maps of a dataset, which are `parse`, and `augment`."""
    drawn = {op for stage in _maps(dataset) for op in stage.random}
    if drawn:
        raise ValueError(
            "`parse` must be deterministic, because its results are cached "
            "and a resumed run must see the same ones. Received: a `parse` "
            f"with {sorted(drawn)}. Move the random part to `augment`, and "
            "draw from its `seed` with `tf.random.stateless_*` or "
            "`tf.image.stateless_*`."
        )
    if augment is not None:
        seed = tf.zeros([2], tf.int64)

        def augmented(*record):
            found = augment(*record, seed=seed)
            if found is None:
                raise TypeError(
                    "`augment` must return the augmented record. Received: "
                    "None. Is there a `return`?"
                )
            return found

        dataset = dataset.map(augmented)
    for stage in _maps(dataset):
        if stage.stateful_random:
            raise ValueError(
                "`augment` must draw only from its `seed`, or a resumed run "
                "would see other records. Received: an `augment` with "
                f"{stage.stateful_random}. Use `tf.random.stateless_*` or "
                "`tf.image.stateless_*` with `seed`. Put Keras' random "
                "layers, which keep their own seeds, into the model."
            )
        for finding in _of_functions(stage):
            warnings.warn(str(finding), stacklevel=4)


def _maps(dataset):
    return [stage for stage in stages_of(dataset) if stage.is_a("Map")]


def _of_functions(stage):
    if stage.python:
        yield Finding(
            "python-function",
            f"A {stage.name} calls Python ({', '.join(stage.python)}), which "
            "holds the interpreter's lock: no two calls run at a time.",
            "Write it in TensorFlow operations, or do it once, beforehand.",
        )
    if stage.stateful_random:
        yield Finding(
            "stateful-random",
            f"A {stage.name} draws from hidden state "
            f"({', '.join(stage.stateful_random)}): a resumed run draws other "
            "numbers, and a parallel one draws them in another order.",
            "Use `tf.random.stateless_*` with a seed made of the record's "
            "number; `augment` of `tfscale.data.pipeline` is given one.",
        )


def _cached(random):
    return Finding(
        "cache-after-random",
        f"A cache keeps what {', '.join(sorted(set(random)))} drew: every "
        "epoch repeats the first one's numbers.",
        "Put `cache` before the random map.",
    )


def _shuffled_late():
    return Finding(
        "shuffle-after-batch",
        "Batches are shuffled, not records: the records of a batch never "
        "change, and the buffer holds whole batches.",
        "Put `shuffle` before `batch`.",
    )
