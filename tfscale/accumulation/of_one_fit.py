"""A train function of one `fit`; later ones find that it has ended."""

import weakref
from collections.abc import Callable
from typing import Any

import keras

from tfscale import _internals


class OfOneFit:
    """What a callback has a model train with, for as long as its `fit` runs.

    Keras tells callbacks nothing of an exception, and keeps the function.

    Args:
        model: The model.
        epochs: The epochs of the `fit` that runs.
        plain: The train function before.
        other: The one that stands in its place.
    """

    def __init__(
        self,
        model: keras.Model,
        epochs: Any,
        plain: Callable[[Any], Any],
        other: Callable[[Any], Any],
    ):
        self._model = weakref.ref(model)
        self._epochs = weakref.ref(epochs)
        self._plain = plain
        self._other = self.__wrapped__ = other

    def __call__(self, iterator):
        """See `keras.Model.train_function`."""
        epochs = self._epochs()
        if epochs is not None and _internals.is_running(epochs):
            return self._other(iterator)
        self._model().train_function = self._plain
        return self._plain(iterator)
