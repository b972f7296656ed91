"""Checks that all workers train the same model in the same way.

Variables and datasets are compared when they are created. Settings without a
variable, such as an activation, a dropout rate or a loss, would differ in
silence, and a validation or a callback of one worker only would wait for ever.

A custom callback may be in one worker only, to print say. If it does
something that all workers have to do, the next check names that.
"""

import hashlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tfscale._internals import attributes
from tfscale._internals import fitting
from tfscale._internals import instances
from tfscale._internals.stack import Call
from tfscale.adapters.epochs import follow
from tfscale.collectives.workers import Workers

# Of no effect here: names count the objects of a process, and all workers draw
# from the seeds of worker 0.
_NOT_COMPARED = {"name", "seed", "build_config", "module", "registered_name"}
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
        yield f"argument `{name}`", described(value)
    kinds = [
        type(one).__name__ if _is_ours(one) else described(one)
        for one in fitting.callbacks_of(call)
        if _is_ours(one) or isinstance(one, _TRAINING)
    ]
    yield "callbacks that train or stop", ", ".join(kinds)
    model = call.model
    for index, layer in enumerate(attributes.flatten_layers(model)):
        if layer is not model:
            yield f"layer {index}", f"{_name(layer)} {_configuration(layer)}"
    yield "model", f"{_name(model)} {_configuration(model)}"
    for name, value in _compiled(model).items():
        yield f"`{name}` of `compile`", described(value)


def _is_ours(callback):
    return type(callback).__module__.startswith("tfscale.")


def _compiled(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a lambda is not portable
        try:
            return model.get_compile_config() or {}
        except Exception:  # of a class without a config
            return {"optimizer": model.optimizer}


def _configuration(layer):
    """The config of a layer, with layers without variables by number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = layer.get_config()
        except Exception:  # Of a user's class, whose config is not needed.
            return ""
    # Variables have been compared with the names of their layers.
    names = {
        each.name: f"layer {index}"
        for index, each in enumerate(attributes.flatten_layers(layer))
        if not each.variables
    }
    return described(config, names)


def described(value: Any, names: dict[str, str] | None = None) -> str:
    """A text that is equal in all processes for equal values."""
    names = names or {}
    if isinstance(value, str):
        return repr(names.get(value, value))
    if value is None or isinstance(value, (bool, int, float, bytes)):
        return repr(value)
    if isinstance(value, dict):
        if value.get("class_name") == "__lambda__":  # its code, as of memory
            return "a lambda"
        texts = [
            f"{key}: {described(one, names)}"
            for key, one in sorted(value.items(), key=lambda x: str(x[0]))
            if key not in _NOT_COMPARED
        ]
        if "DTypePolicy" in str(value.get("class_name")):
            texts.append(str(value.get("config")))
        return f"{{{', '.join(texts)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(described(one, names) for one in value)}]"
    if isinstance(value, (np.ndarray, np.generic)):
        content = hashlib.sha256(value.tobytes()).hexdigest()
        return f"{value.dtype}{list(value.shape)} {content[:8]}"
    if isinstance(value, keras.callbacks.Callback):
        settings = {
            name: one
            for name, one in instances.attributes_of(value).items()
            if isinstance(one, (bool, int, float, str))
            and not name.startswith("_")
            and name != "verbose"
        }
        return f"{_name(value)} {described(settings)}"
    if hasattr(value, "get_config") and not isinstance(value, type):
        return f"{_name(value)} {_config_of(value, names)}"
    return getattr(value, "__qualname__", type(value).__name__)


def _config_of(value, names):
    try:
        return described(value.get_config(), names)
    except Exception:
        return ""


def _name(value):
    return type(value).__name__
