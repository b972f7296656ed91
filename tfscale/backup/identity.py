"""Whether a run is the one of a backup: its model, data and callbacks.

Variables of the same shapes may belong to another activation, optimizer or
dtype policy, so configurations are compared. Left out is what differs between
runs of one program: numbers at the ends of names, and options that change the
speed of steps but not their results.
"""

import json
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import fitting
from tfscale.backup.files.committed import Backup
from tfscale.backup.state import variables
from tfscale.backup.state.data_position import DataPosition
from tfscale.fit.configuration import of_compile
from tfscale.fit.configuration import plain
from tfscale.mesh.models.wrapped_model import WrappedModel

_LEFT_OUT = ("jit_compile", "run_eagerly", "steps_per_execution")


def identity(
    model: keras.Model,
    epochs: Any,
    callbacks: Sequence[keras.callbacks.Callback],
    data: DataPosition,
) -> dict[str, Any]:
    """JSON of `configuration`, `data` and `callbacks`, to be compared."""
    spec = fitting.element_spec_of(epochs)
    shapes = [
        f"{tensor.dtype.name}{list(tensor.shape)[1:]}"
        for tensor in tf.nest.flatten(spec)
        if isinstance(tensor, tf.TensorSpec)
    ]
    return {
        "configuration": configuration(model),
        "data": [*shapes, *data.identity()],
        "callbacks": [type(callback).__name__ for callback in callbacks],
    }


def check(
    backup: Backup,
    model: keras.Model,
    worker: int,
    now: dict[str, Any],
    out_of_reach: str | None = None,
) -> None:
    """Refuses to continue from a backup of another run; names a difference."""
    found = variables.difference(variables.variables_of(model), backup)
    saved = backup.state_of(worker)
    for what, value in now.items():
        if found is None and saved.get(what) != value:
            found = (
                difference(value, saved.get(what))
                if what == "configuration"
                else f"{what} {value}, saved {saved.get(what)}"
            )
    found = found or out_of_reach
    if found is not None:
        raise ValueError(
            "A run must continue with the same model, optimizer, data and "
            f"callbacks. Received: {found}, of backup {backup.path!r}. Nothing "
            "was changed. Undo the difference, or use another `backup_dir`."
        )


def configuration(model: keras.Model) -> str:
    """JSON of the configuration of a model and of its `compile`.

    A class without configuration has null, and one that overrides `compile`
    its optimizer.
    """
    # A pipeline, which wraps a model, is saved as that one.
    inner = model.model if isinstance(model, WrappedModel) else model
    found = {"model": inner, "compiled": of_compile(model)}
    return json.dumps(plain(found, _LEFT_OUT))


def difference(now: str, saved: str | None) -> str | None:
    """The first path at which two configurations differ, or None."""
    return _difference(json.loads(now), json.loads(saved or "null"), "")


def _difference(now, saved, path):
    if now == saved:
        return None
    if isinstance(now, list) and isinstance(saved, list):
        if len(now) != len(saved):
            return f"{path} of {len(now)}, saved {len(saved)}"
        now, saved = dict(enumerate(now)), dict(enumerate(saved))
    if isinstance(now, dict) and isinstance(saved, dict):
        found = (
            _difference(
                now.get(key), saved.get(key), f"{path}/{key}".strip("/")
            )
            for key in sorted({*now, *saved})
        )
        return next(filter(None, found), None)
    return f"{path} {_short(now)}, saved {_short(saved)}"


def _short(value):
    text = json.dumps(value)
    return text if len(text) < 100 else f"{text[:100]}..."
