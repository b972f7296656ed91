"""The findings of `explain`: as data and as a table."""

import dataclasses
from typing import Any

import rich.table

from tfscale.formatting import as_text

_TELLING = 1.05  # a gain below this is noise


@dataclasses.dataclass(frozen=True)
class StageTime:
    """A stage: the seconds that it adds to a batch, and those up to it."""

    name: str
    added_seconds: float
    total_seconds: float


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A change, and how much faster the pipeline is with it.

    The gain is the rate with the change over the rate without: measured for
    prefetching, else estimated from the times of the stages.
    """

    text: str
    gain: float


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Where a pipeline's time goes.

    Attributes:
        seconds_per_batch: Float, of the pipeline alone.
        first_batch_seconds: Float.
        stages: Tuple of `StageTime`, from the source on.
        suggestions: Tuple of `Suggestion`, the best first.
        findings: Tuple of `Finding`.
        decisions: Tuple of strings, what a pipeline has decided, and why.

    Example:

    >>> import tensorflow as tf
    >>> from tfscale import data
    >>> explanation = data.explain(
    ...     tf.data.Dataset.range(99).batch(3), seconds=0.01
    ... )
    >>> [stage.name for stage in explanation.stages]
    ['range', 'batch']
    """

    seconds_per_batch: float
    first_batch_seconds: float
    stages: tuple[StageTime, ...]
    suggestions: tuple[Suggestion, ...]
    findings: tuple
    decisions: tuple[str, ...] = ()

    @property
    def bottleneck(self) -> str:
        """Name of the stage that adds most to the time of a batch."""
        return max(self.stages, key=lambda s: s.added_seconds).name

    def as_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists and numbers, for `json`."""
        return {**dataclasses.asdict(self), "bottleneck": self.bottleneck}

    def __str__(self) -> str:
        return as_text(self._stage_table(), *self._verdict(), width=80)

    def _stage_table(self):
        columns = ("stage", "adds ms", "total ms", "")
        table = rich.table.Table(*columns, title="A batch, stage by stage")
        longest = max(s.added_seconds for s in self.stages) or 1.0
        for stage in self.stages:
            table.add_row(
                stage.name,
                f"{stage.added_seconds * 1e3:.2f}",
                f"{stage.total_seconds * 1e3:.2f}",
                "#" * round(stage.added_seconds / longest * 24),
            )
        return table

    def _verdict(self):
        yield (
            f"Pipeline alone: {1 / self.seconds_per_batch:.1f} batches/s, "
            f"first batch after {self.first_batch_seconds:.2f} s. "
            f"Slowest stage: {self.bottleneck}."
        )
        yield from self.decisions
        for suggestion in self.suggestions:
            worth = "" if suggestion.gain >= _TELLING else " (not worth it)"
            yield f"{suggestion.gain:5.2f}x  {suggestion.text}{worth}"
        for finding in self.findings:
            yield str(finding)
