"""Configurations as JSON that workers, and runs of one program, can compare.

Lambdas are equal, as their code contains paths, and so are learning rates that
are floats: these are variables, which are compared or restored.
"""

import hashlib
import re
import warnings
from collections.abc import Collection
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

_NUMBER = re.compile(r"_\d+$")
# Of the batch, or the file, that a layer was built from.
_NEVER = ("build_config", "build_input_shape", "shared_object_id")


def of_layer(layer: Any) -> Any:
    """`get_config` of a layer or the like; None if its class has none."""
    return _quietly(layer.get_config)


def of_compile(model: keras.Model) -> dict[str, Any]:
    """Arguments of `compile`, or the optimizer if its class has another."""
    found = _quietly(model.get_compile_config)
    return found or {"optimizer": getattr(model, "optimizer", None)}


def _quietly(get_config):
    with warnings.catch_warnings(action="ignore"):  # no lambda is portable
        try:
            return get_config()
        except Exception:  # of a user's class, whose config is not needed
            return None


def plain(
    value: Any,
    without: Collection[str],
    names: Mapping[str, str] | None = None,
) -> Any:
    """JSON that is equal in all processes for equal values.

    Args:
        value: A configuration, or a part of one.
        without: Keys that need not be equal.
        names: What stands for some strings. Of others, the number at the end,
            which counts the objects of a process, is left out.
    """

    def inside(value):
        return plain(value, without, names)

    match value:
        case str():
            return (names or {}).get(value, _NUMBER.sub("", value))
        case None | bool() | int() | float():
            return value
        case bytes():
            return repr(value)
        case {"class_name": "__lambda__"}:
            return "a lambda"
        case {"class_name": str(kind), "config": config} if (
            "DTypePolicy" in kind and "name" in without
        ):
            # A name is all that most of them have.
            return [kind, plain(config, {*without} - {"name"}, names)]
        case dict():
            return {
                # Without the rows of a replica's batch.
                str(k): inside(v[1:] if k == "batch_shape" and v else v)
                for k, v in sorted(value.items(), key=lambda x: str(x[0]))
                if k not in (*_NEVER, *without)
                and not (k == "learning_rate" and isinstance(v, float))
            }
        case list() | tuple():
            return [inside(v) for v in value if not _is_first_of_sequential(v)]
        case np.ndarray() | np.generic():
            content = hashlib.sha256(value.tobytes()).hexdigest()
            return f"{value.dtype}{list(value.shape)} {content[:8]}"
    if isinstance(value, type) or not hasattr(value, "get_config"):
        return getattr(value, "__qualname__", type(value).__name__)
    kind = type(value).__name__
    return inside({"class_name": kind, "config": of_layer(value)})


def _is_first_of_sequential(value):
    """Whether it is the input of a `Sequential`, which has it once built."""
    return (
        isinstance(value, dict)
        and value.get("class_name") == "InputLayer"
        and "inbound_nodes" not in value  # which those of other models have
    )
