"""The random states of a process: of Keras, TensorFlow, Python and NumPy."""

import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale._internals import attributes


def random_states() -> dict[str, Any]:
    """The states, for `json_arrays.split`.

    Generators that are attributes of layers are variables of the model. A
    global generator that was never used is not created: it would belong to the
    strategy in scope. The state of stateful operations of `tf.random`, in their
    kernels, cannot be read.
    """
    seeds = attributes.used_seed_generator()
    generator = attributes.global_generator()
    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "keras": seeds and _values(seeds),
        "tensorflow": generator and _values(generator),
        "python": random.getstate(),
        "numpy": [name, keys, int(position), int(has_gauss), float(gauss)],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Sets a result of `random_states`."""
    if states["keras"] is not None:
        if attributes.used_seed_generator() is None:
            keras.random.uniform(())  # makes it
        _set(attributes.used_seed_generator(), states["keras"])
    if states["tensorflow"] is not None:
        if attributes.global_generator() is None:
            tf.random.set_global_generator(
                tf.random.Generator.from_state(
                    states["tensorflow"][0], alg="philox"
                )
            )
        _set(tf.random.get_global_generator(), states["tensorflow"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(states["numpy"]))


def handles() -> list[tf.Tensor]:
    """The handles of the variables of these states."""
    found = attributes.used_seed_generator(), attributes.global_generator()
    return [each.handle for one in found if one for each in _components(one)]


def _values(generator):
    return np.stack([each.numpy() for each in _components(generator)])


def _set(generator, values):
    components = _components(generator)
    for index, component in enumerate(components):
        component.assign(values[index % len(values)])


def _components(generator):
    """The variables of its state: several if it was created under a strategy.

    That may not be the strategy in scope.
    """
    state = generator.state
    if isinstance(state, keras.Variable):
        state = attributes.value_of(state)
    if isinstance(state, tf.distribute.DistributedValues):
        return state.values
    return [state]
