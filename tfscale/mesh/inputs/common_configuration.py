"""Checks that all workers train the same model in the same way.

Variables and datasets are compared when they are created. Settings without a
variable, such as an activation, a dropout rate or a loss, would differ in
silence, and a validation or a callback of one worker only would wait for ever.

A custom callback may be in one worker only, to print say. If it does
something that all workers have to do, the next check names that.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import keras

from tfscale._internals import attributes
from tfscale._internals import fitting
from tfscale._internals import instances
from tfscale._internals.stack import Call
from tfscale.adapters.epochs import follow
from tfscale.collectives.workers import Workers
from tfscale.fit.configuration import of_compile
from tfscale.fit.configuration import of_layer
from tfscale.fit.configuration import plain

# Of no effect here: names count the objects of a process, and all workers draw
# from the seeds of worker 0.
_NOT_COMPARED = ("name", "seed")
# Callbacks of Keras that change what is trained, or when it ends.
_TRAINING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
    keras.callbacks.TerminateOnNaN,
)
_compared: "weakref.WeakSet[Any]" = weakref.WeakSet()


def check(call: Call, workers: Workers) -> None:
    """Raises a ValueError if workers differ in what they are about to run.

    From then on an error in a step names the worker that is lost.

    Args:
        call: The call of `fit`, `evaluate` or `predict`; before an epoch begins
            it is compared only if that has not been done.
        workers: The workers.
    """
    if call.epochs not in _compared:
        _compared.add(call.epochs)
        facts = dict(_facts_of(call))
        workers.coordination.check_same(f"call of `{call.purpose}`", facts)
        follow(call.epochs, around_steps=workers.naming_lost)
    if call.stage == "run":
        workers.coordination.check_same(f"epoch of `{call.purpose}`", "begins")


def _facts_of(call) -> Iterator[tuple[str, str]]:
    for name, value in call.arguments.items():
        if name == "validation_data":
            value = value is not None
        yield f"argument `{name}`", _described(value)
    # Keras cuts them in a function of a dataset, where no size can be read.
    yield "batches of arrays", ", ".join(fitting.rows_of_arrays(call.epochs))
    kinds = [
        f"{type(one).__name__} {_described(_settings_of(one))}"
        for one in fitting.callbacks_of(call)
        if _is_ours(one) or isinstance(one, _TRAINING)
    ]
    yield "callbacks that train or stop", ", ".join(kinds)
    model = call.model
    for index, layer in enumerate(attributes.flatten_layers(model)):
        if layer is not model:
            yield f"layer {index}", _described_layer(layer)
    yield "model", _described_layer(model)
    for name, value in of_compile(model).items():
        yield f"`{name}` of `compile`", _described(value)


def _is_ours(callback):
    return type(callback).__module__.startswith("tfscale.")


def _settings_of(callback):
    """Arguments of a callback of Keras; ours compare theirs themselves."""
    return {
        name: value
        for name, value in instances.attributes_of(callback).items()
        if isinstance(value, (bool, int, float, str))
        and not (name.startswith("_") or name == "verbose")
        and not _is_ours(callback)
    }


def _described_layer(layer):
    # Variables have been compared with the names of their layers.
    names = {
        each.name: each.name if each.variables else f"layer {index}"
        for index, each in enumerate(attributes.flatten_layers(layer))
    }
    return f"{type(layer).__name__} {_described(of_layer(layer), names)}"


def _described(value, names=None):
    return repr(plain(value, _NOT_COMPARED, names))
