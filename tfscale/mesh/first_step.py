"""Says that a step is traced and compiled, once that takes long.

`fit` prints nothing before its first step has ended. A thread starts where a
step is traced, and looks some seconds later whether `fit` is still in it.
"""

import threading
import time
import weakref
from typing import Any

import keras

from tfscale._internals import attributes
from tfscale._internals import fitting
from tfscale.adapters.shared_model import SharedModel

_SECONDS = 10.0
# The epochs of calls of `fit` that have a thread.
_watched: "weakref.WeakSet[Any]" = weakref.WeakSet()


def tell_if_long(model: keras.Model, mesh: Any) -> None:
    """Prints a line if the `fit` of this thread is in this step for long.

    It is one line for a `fit`, and none with `verbose=0`.
    """
    call = fitting.keras_call()
    if call is None or call.purpose != "fit" or call.epochs in _watched:
        return
    params = getattr(call.callbacks, "params", None) or {}
    if not params.get("verbose"):
        return
    _watched.add(call.epochs)
    sizes = dict(zip(mesh.axis_names, mesh.shape))
    sizes = {name: size for name, size in sizes.items() if size > 1}
    axes = ", ".join(f"{name}={size}" for name, size in sizes.items())
    where = f"a mesh of {axes}" if axes else "one device"
    line = (
        f"Tracing and compiling the first step of {model.name!r} for {where}: "
        "later steps begin at once."
    )
    if "data" in sizes and _can_be_a_stage(model):
        line += (
            " Each replica is traced; a `tfscale.PipelineModel(model, "
            "num_microbatches=1)` is traced once for all."
        )
    arguments = (
        line,
        threading.get_ident(),
        weakref.ref(call.epochs),
        fitting.steps_begun(call.epochs),
    )
    threading.Thread(target=_tell, args=arguments, daemon=True).start()


def _can_be_a_stage(model):
    """Whether that helps, and does not change what a step is."""
    return (
        not isinstance(model, SharedModel)
        and attributes.functional_of(model) is not None
        and attributes.is_step_of_keras(model.train_step)
    )


def _tell(line, thread, epochs_of, begun):
    time.sleep(_SECONDS)
    running = fitting.keras_call(thread)
    epochs = epochs_of()
    if running is None or epochs is None or running.epochs is not epochs:
        return  # it has ended, or validates
    is_same = fitting.steps_begun(epochs) == begun
    if is_same and keras.config.is_interactive_logging_enabled():
        print(line, flush=True)
