"""Whether a run is the one of a backup: its model, data and callbacks."""

from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import fitting
from tfscale.backup import configuration
from tfscale.backup.files.committed import Backup
from tfscale.backup.state import callback_states
from tfscale.backup.state import variables
from tfscale.backup.state.data_position import DataPosition


def identity(
    model: keras.Model, epochs: Any, callbacks: Any, data: DataPosition
) -> dict[str, Any]:
    """JSON of `configuration`, `data` and `callbacks`, to be compared."""
    spec = fitting.element_spec_of(epochs)
    shapes = [
        f"{tensor.dtype.name}{list(tensor.shape)[1:]}"
        for tensor in tf.nest.flatten(spec)
        if isinstance(tensor, tf.TensorSpec)
    ]
    names = callback_states.names(callbacks.callbacks)
    # With `verbose=0` there is no progress bar.
    names = [name for name in names if name != "ProgbarLogger"]
    return {
        "configuration": configuration.of_model(model),
        "data": [*shapes, *data.identity()],
        "callbacks": names,
    }


def check(
    backup: Backup, model: keras.Model, worker: int, now: dict[str, Any]
) -> None:
    """Refuses to continue from a backup of another run.

    Raises:
        ValueError: If the backup is of another model, optimizer, other data or
            callbacks; the error names the difference.
    """
    difference = variables.difference(variables.variables_of(model), backup)
    if difference is None:
        saved = backup.state_of(worker)
        for what, found in now.items():
            before = saved.get(what)
            if difference is None and before != found:
                difference = (
                    configuration.difference(found, before)
                    if what == "configuration"
                    else f"{what} {found}, saved {before}"
                )
    if difference is not None:
        raise ValueError(
            "A run must continue with the same model, optimizer, data and "
            f"callbacks. Received: {difference}, of backup {backup.path!r}. "
            "Nothing was changed. Restore the difference, or take another "
            "`backup_dir`."
        )
