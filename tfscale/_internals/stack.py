"""Which methods of Keras run: the only module that reads Python's call stack.

A callback, a strategy or a dataset finds the `fit` around it in local variables
of Keras' methods: there is no other way. Keras draws a batch to look at before
any callback runs, and before it names the model to a strategy; tf.data asks in
a thread of its own; nothing tells of a `fit` that an exception has ended. Each
name is listed in `keras_names`, with why.
"""

import functools
import inspect
import sys
import threading
import types
from typing import Any
from typing import NamedTuple

import keras

from tfscale._internals.symbols import TFEpochIterator


class Call(NamedTuple):
    """A call of `fit`, `evaluate` or `predict`, or of a method for a batch.

    `purpose` is the method's name, None for a batch. `stage` is "create" where
    epochs are created, "probe" where Keras builds a model from a batch, and
    else "run". `epochs` is None for a batch. `arguments` are those of
    `ARGUMENTS` that the method has.
    """

    purpose: str | None
    stage: str
    model: Any
    epochs: Any
    callbacks: Any
    arguments: dict[str, Any]


# The arguments that workers compare, see `fitting.keras_call`.
ARGUMENTS = (
    *("epochs", "initial_epoch", "steps_per_epoch", "steps", "class_weight"),
    *("validation_data", "validation_steps", "validation_freq"),
)


@functools.cache
def _methods() -> dict[types.CodeType, str]:
    """Names of methods and stages, by their code."""
    names = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch")
    found = {
        inspect.unwrap(getattr(keras.Model, name)).__code__: name
        for name in names
    }
    found[TFEpochIterator.__init__.__code__] = "create"
    found[keras.Model._maybe_symbolic_build.__code__] = "probe"
    return found


def calls(thread: int | None = None) -> list[Call]:
    """The calls of Keras' methods in a thread, the innermost first."""
    # Not this frame, which would be in a cycle with its variables.
    frame: types.FrameType | None = sys._getframe(1)
    if thread not in (None, threading.get_ident()):
        frame = sys._current_frames().get(thread)
    found = []
    stage, epochs = "run", None
    while frame is not None:
        name = _methods().get(frame.f_code)
        variables = frame.f_locals if name else {}
        if name in ("create", "probe"):
            stage, epochs = name, variables["self"]
        elif name is not None:
            if stage != "create":  # `fit` creates those of validation too
                epochs = variables.get("epoch_iterator")
            found.append(
                Call(
                    None if name.endswith("_on_batch") else name,
                    stage,
                    variables["self"],
                    epochs,
                    variables.get("callbacks"),
                    {n: variables[n] for n in ARGUMENTS if n in variables},
                )
            )
            stage, epochs = "run", None
        frame = frame.f_back
    return found
