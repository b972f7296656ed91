"""The numbers of a training, and how far two of them are apart."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from tfscale.adapters.optimizer import optimizers_of


@dataclasses.dataclass(frozen=True)
class Key:
    """Names a number: of a phase of Keras, of a kind, by its name."""

    phase: str  # "fit", "evaluate" or "predict"
    kind: str  # "weight", "slot", "log" or "output"
    name: str


def relative_distance(found: Any, expected: Any, largest: float = 0.0) -> float:
    """The largest difference over the largest magnitude of what is expected.

    Two trainings add the same numbers up in another order, so the error of an
    element is that of the largest terms of its sum and not of its own size.
    `largest` is the magnitude of earlier values; NaN equals NaN.
    """
    found, expected = _wide(found), _wide(expected)
    if found.shape != expected.shape:
        return np.inf
    both = ~(np.isnan(found) & np.isnan(expected))
    difference = np.max(np.abs(found - expected), initial=0.0, where=both)
    if not difference:
        return 0.0
    scale = max(largest, magnitude(expected))
    far = difference / scale if scale else np.inf
    return float(far) if np.isfinite(far) else np.inf


def magnitude(values: Any) -> float:
    """The largest magnitude of some numbers; 0 of none."""
    wide = _wide(values)
    return float(np.max(np.abs(wide), initial=0.0, where=np.isfinite(wide)))


def _wide(values):
    values = np.asarray(values)
    is_complex = np.issubdtype(values.dtype, np.complexfloating)
    return values.astype("complex128" if is_complex else "float64")


def values_of(variables: Iterable[keras.Variable]) -> dict[str, np.ndarray]:
    """The values of variables, by path; a second one of a path is numbered."""
    found: dict[str, np.ndarray] = {}
    for variable in variables:
        path, count = variable.path, 1
        while path in found:
            count += 1
            path = f"{variable.path} ({count})"
        found[path] = np.array(variable)
    return found


def weights_and_slots(
    inner: keras.Model, trained: keras.Model
) -> dict[tuple[str, str], np.ndarray]:
    """All variables of a model and of its optimizers, by kind and path."""
    slots = [v for o in optimizers_of(trained) for v in o.variables]
    return {
        **{("weight", n): v for n, v in values_of(inner.variables).items()},
        **{("slot", n): v for n, v in values_of(slots).items()},
    }
