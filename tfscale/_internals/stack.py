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
    """A method of a Keras model that runs.

    `purpose` is "fit", "evaluate" or "predict"; "probe" if Keras draws a batch
    to see what it is like; "create" where epochs are created, of no model.
    `epochs` is None before they are created, and in `train_on_batch`.
    `arguments` are those of `ARGUMENTS` that the method has.
    """

    purpose: str
    model: Any
    epochs: Any
    callbacks: Any
    arguments: dict[str, Any]


# What workers compare, see `fitting.keras_call`.
ARGUMENTS = (
    *("epochs", "initial_epoch", "steps_per_epoch", "steps", "class_weight"),
    *("validation_data", "validation_steps", "validation_freq"),
)


@functools.cache
def _purposes() -> dict[types.CodeType, tuple[str, str]]:
    """By a method's code: its purpose, and its variable for the epochs."""
    found = {
        TFEpochIterator.__init__.__code__: ("create", "self"),
        keras.Model._maybe_symbolic_build.__code__: ("probe", "iterator"),
    }
    for name in ("fit", "evaluate", "predict"):
        method = inspect.unwrap(getattr(keras.Model, name))
        found[method.__code__] = (name, "epoch_iterator")
    return found


def calls(thread: int | None = None) -> list[Call]:
    """The calls of Keras' methods in a thread, the innermost first."""
    # Not this frame, which would be in a cycle with its variables.
    frame: types.FrameType | None = sys._getframe(1)
    if thread not in (None, threading.get_ident()):
        frame = sys._current_frames().get(thread)
    found = []
    while frame is not None:
        purpose, epochs = _purposes().get(frame.f_code, (None, ""))
        if purpose is not None:
            variables = frame.f_locals
            model = None if purpose == "create" else variables["self"]
            callbacks = variables.get("callbacks")
            arguments = {
                name: variables[name]
                for name in ARGUMENTS
                if purpose in ("fit", "evaluate", "predict")
                and name in variables
            }
            found.append(
                Call(
                    purpose, model, variables.get(epochs), callbacks, arguments
                )
            )
        frame = frame.f_back
    return found
