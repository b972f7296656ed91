"""The random states of a process: of Keras, TensorFlow, Python and NumPy."""

import random
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale import _internals


def random_states() -> dict[str, Any]:
    """The states as they are, for `json_arrays.split`.

    Those of generators that are attributes of layers are variables of the
    model. What stateful operations of `tf.random` keep in their kernels cannot
    be read.
    """
    generator = _global_generator()
    name, keys, place, has_gauss, gauss = np.random.get_state()
    return {
        "keras": _internals.value_of(
            _internals.global_seed_generator().state
        ).numpy(),
        "tensorflow": generator.state.numpy() if generator else None,
        "python": random.getstate(),
        "numpy": [name, keys, int(place), int(has_gauss), float(gauss)],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Sets what `random_states` returned."""
    _internals.global_seed_generator().state.assign(states["keras"])
    if states["tensorflow"] is not None:
        tf.random.get_global_generator().state.assign(states["tensorflow"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(states["numpy"]))


def _global_generator():
    """TensorFlow's, which is not made where operations are deterministic."""
    try:
        return tf.random.get_global_generator()
    except RuntimeError:
        return None
