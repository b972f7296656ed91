"""The result of `tfscale.compare`: every number, and how far it is apart."""

import dataclasses
from typing import Any

import numpy as np
import rich.markup
import rich.table

from tfscale.comparison import facts
from tfscale.comparison.facts import Facts
from tfscale.comparison.numbers import Key
from tfscale.comparison.numbers import magnitude
from tfscale.comparison.numbers import relative_distance
from tfscale.formatting import as_text

_WIDTH, _MOST_ROWS = 120, 20
# Times the rounding of its dtype, of the largest gradient of the model.
_IS_ROUNDING = 10


@dataclasses.dataclass(frozen=True)
class Difference:
    """A number that differs from that of one device.

    Attributes:
        phase: `"fit"`, `"evaluate"` or `"predict"`.
        kind: `"weight"`, `"slot"`, `"log"` or `"output"`.
        name: Its path or name.
        step: The first step after which it differs, from 1; None but for `fit`.
        size: The largest difference in any step, over the largest magnitude.
        reason: The row of docs/numbers.md that explains it.
    """

    phase: str
    kind: str
    name: str
    step: int | None
    size: float
    reason: str


class Comparison:
    """The report of `tfscale.compare`.

    Attributes:
        distances: For each number how far it is from that of one device, after
            each step, over the largest magnitude in its tensor.
        drawing: Paths of layers that drew random numbers.
        skipped: Of `evaluate` and `predict`, those that the model has not on
            one device either, with the error.
    """

    def __init__(
        self, expected: Any, found: Any, facts: Facts, skipped: dict[str, str]
    ):
        self.drawing = list(facts.drawing)
        self.skipped = skipped
        self._facts = facts
        self.distances: dict[Key, list[float]] = {}
        others = _matched(list(expected.numbers), list(found.numbers))
        for key, values in expected.numbers.items():
            again = found.numbers.get(others.get(key, key), [])
            largest = max(map(magnitude, values), default=0.0)
            if key.kind == "weight":
                initial = expected.initial.get(key.name, 0.0)
                largest = max(largest, magnitude(initial))
            self.distances[key] = [np.inf]
            if len(again) == len(values):
                self.distances[key] = [
                    relative_distance(b, a, largest)
                    for a, b in zip(values, again)
                ]
        self._without_gradient = _without_gradient(expected)

    def differences(self, rtol: float = 1e-5) -> list[Difference]:
        """Each number that is further than `rtol` from that of one device.

        Weights whose gradients are rounding errors, and their slots, count as
        equal: nothing depends on them. `table` counts them.
        """
        far = {
            key: distances
            for key, distances in self.distances.items()
            if max(distances) > rtol and not self._is_rounding(key)
        }
        return [
            Difference(
                key.phase,
                key.kind,
                key.name,
                _first(distances, rtol) if key.phase == "fit" else None,
                max(distances),
                facts.reason_of(key, far, self._facts),
            )
            for key, distances in far.items()
        ]

    @property
    def largest(self) -> float:
        """The largest difference, over the largest magnitude in its tensor."""
        distances = [
            distance
            for key, of_steps in self.distances.items()
            if not self._is_rounding(key)
            for distance in of_steps
        ]
        return max(distances, default=0.0)

    def _is_rounding(self, key):
        if key.kind == "weight":
            return key.name in self._without_gradient
        # A slot's name has the path of its weight between two others.
        name = key.name.replace("/", "_")
        return key.kind == "slot" and any(
            f"_{path.replace('/', '_')}_" in name
            for path in self._without_gradient
        )

    def table(self, rtol: float = 1e-5) -> str:
        """The differences as a table, and how much was compared."""
        found = self.differences(rtol)
        table = rich.table.Table(
            *("In", "What", "Name", "Step", "Difference"),
            "Row of docs/numbers.md",
        )
        for each in found[:_MOST_ROWS]:
            table.add_row(
                each.phase,
                each.kind,
                rich.markup.escape(each.name),
                str(each.step or ""),
                f"{each.size:.1e}",
                rich.markup.escape(each.reason),
            )
        tables = [table] * bool(found)
        return as_text(*tables, *self._lines(found), width=_WIDTH)

    def _lines(self, found):
        if len(found) > _MOST_ROWS:
            yield f"{len(found) - _MOST_ROWS} more differ."
        counts = [
            f"{sum(k.kind == kind for k in self.distances)} {kind}s"
            for kind in ("weight", "slot", "log", "output")
        ]
        yield (
            f"Compared: {', '.join(counts)}; {len(found)} differ. The largest "
            f"difference is {self.largest:.1e} of the largest magnitude in a "
            "tensor."
        )
        if self._without_gradient:
            yield (
                f"{len(self._without_gradient)} weights have only rounding "
                f"errors as gradients: {', '.join(self._without_gradient[:3])}."
            )
        if self.drawing:
            yield (
                "These drew random numbers, which differ on any mesh: "
                f"{', '.join(self.drawing)}."
            )
        for phase, why in self.skipped.items():
            yield f"Not compared: {phase}, which fails on one device too: {why}"

    def check(self, rtol: float = 1e-5) -> None:
        """Raises a ValueError with the table if a number differs."""
        if self.differences(rtol):
            raise ValueError(
                "A model must give the same numbers under the strategy as on "
                f"one device. Received, with rtol={rtol}:\n{self.table(rtol)}"
            )


def _matched(expected, found):
    """Keys of the other side, by position: slots have automatic names."""
    pairs = {}
    for kind in ("weight", "slot"):
        ours, theirs = (
            [k for k in keys if k.kind == kind] for keys in (expected, found)
        )
        if len(ours) == len(theirs):
            pairs |= dict(zip(ours, theirs))
    return pairs


def _first(distances, rtol):
    return 1 + next(i for i, far in enumerate(distances) if far > rtol)


def _without_gradient(training):
    """Paths of weights whose gradients are no more than rounding errors."""
    largest = max(training.gradients.values(), default=0.0)
    found = []
    for path, size in training.gradients.items():
        dtype = training.initial[path].dtype
        eps = np.finfo(dtype).eps if dtype.kind == "f" else 1e-2
        if 0 < size <= _IS_ROUNDING * eps * largest:
            found.append(path)
    return found
