"""A model that is built to be looked at, and leaves nothing behind."""

import concurrent.futures
import random
from collections.abc import Callable

import keras
import numpy as np

from tfscale import _internals


def built_aside(build: Callable[[], keras.Model]) -> keras.Model:
    """Calls a function that builds a model, on the host and in no scope.

    What is built next has the names and the initial weights that it would have
    had: the numbers of Keras' automatic names, and the random states of Python
    and NumPy, from which Keras draws seeds, are as before.

    Args:
        build: The function, of no arguments.
    """
    names = _internals.automatic_names()
    policy = keras.config.dtype_policy()

    def run():
        # Strategies, scopes and names of Keras are those of a thread.
        keras.config.set_dtype_policy(policy)
        _internals.automatic_names().update(names)
        with keras.device("cpu:0"):
            return build()

    states = random.getstate(), np.random.get_state()
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            return executor.submit(run).result()
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
