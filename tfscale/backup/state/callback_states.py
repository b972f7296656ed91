"""The state of callbacks: from `get_state`, or by a table for those of Keras.

A class that is not known is named once: its state, if it has any, is lost.
"""

import logging
from collections.abc import Sequence
from typing import Any

import keras

from tfscale._internals import fitting

_callbacks = keras.callbacks

# Attributes by class, private ones among them: `_internals` lists these.
# `min_delta` of those that monitor is left out: its sign is set on first use.
_ATTRIBUTES = {
    _callbacks.EarlyStopping: (
        *("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    ),
    _callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    _callbacks.ModelCheckpoint: ("best", *fitting.MODEL_CHECKPOINT_COUNTERS),
    _callbacks.SwapEMAWeights: fitting.SWAP_EMA_STATE,
    _callbacks.TensorBoard: fitting.TENSORBOARD_STEPS,
    _callbacks.History: ("history", "epoch"),
    # They have no state: their actions follow from epoch and logs.
    _callbacks.LearningRateScheduler: (),
    _callbacks.RemoteMonitor: (),
    _callbacks.TerminateOnNaN: (),
}


def warn_of_unknown(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Names, once for a `fit`, the callbacks whose state is not kept."""
    unknown = [
        _described(callback)
        for callback in callbacks
        if not hasattr(callback, "get_state")
        and type(callback) is not _known_class(callback)
        and not type(callback).__module__.startswith("tfscale.")
    ]
    if unknown:
        logging.warning(
            "BackupAndRestore keeps no state of %s. If one has a state, give "
            "it methods `get_state` and `set_state`, of numbers, strings and "
            "arrays.",
            ", ".join(sorted(set(unknown))),
        )


def _known_class(callback):
    """The class of Keras whose state is known, of this one or a subclass."""
    kinds = (*_ATTRIBUTES, _callbacks.CSVLogger)
    return next((kind for kind in kinds if isinstance(callback, kind)), None)


def _described(callback):
    name, kind = type(callback).__name__, _known_class(callback)
    # A subclass may have more attributes.
    return f"{name} beyond that of {kind.__name__}" if kind else name


def state_of(callback: keras.callbacks.Callback) -> Any:
    """The state of a callback, for `json_arrays.split`, or None."""
    if hasattr(callback, "get_state"):
        return callback.get_state()
    if isinstance(callback, _callbacks.CSVLogger):
        return _lines_of(callback)
    kind = _known_class(callback)
    if kind is None:
        return None
    return {
        name: getattr(callback, name)
        for name in _ATTRIBUTES[kind]
        if hasattr(callback, name)
    }


def set_state(callback: keras.callbacks.Callback, state: Any) -> None:
    """Sets a result of `state_of`."""
    if state is None:
        return
    if hasattr(callback, "set_state"):
        callback.set_state(state)
    elif isinstance(callback, _callbacks.CSVLogger):
        _set_lines(callback, state)
    else:
        for name, value in state.items():
            setattr(callback, name, value)


def _lines_of(logger):
    """The text of the file, or its length if `append` keeps the file."""
    logger.csv_file.flush()
    with open(logger.filename, newline="") as file:
        text = file.read()
    if logger.append:
        return {"keys": logger.keys, "length": len(text)}
    return {"keys": logger.keys, "text": text}


def _set_lines(logger, state):
    """Restores the file, so that each line is there once."""
    logger.csv_file.close()
    if logger.append:
        with open(logger.filename, newline="") as file:
            state = {**state, "text": file.read()[: state["length"]]}
    with open(logger.filename, "w", newline="") as file:
        file.write(state["text"])
    had_header, append = bool(state["text"]), logger.append
    # Opens the file to append to it.
    logger.append = True
    logger.on_train_begin()
    logger.append, logger.append_header = append, not had_header
    logger.keys = state["keys"]
