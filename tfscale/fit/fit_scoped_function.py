"""A train function of one `fit`; later ones find that it has ended."""

import weakref
from collections.abc import Callable
from typing import Any

import keras

from tfscale.fit.fit import Fit


class FitScopedFunction:
    """The train function `other` in the place of `plain` while a `fit` runs.

    Keras tells callbacks nothing of an exception, and keeps the function.
    """

    def __init__(
        self,
        model: keras.Model,
        fit: Fit,
        plain: Callable[[Any], Any],
        other: Callable[[Any], Any],
    ):
        self._model = weakref.ref(model)
        self._fit = fit
        self._plain = plain
        self._other = self.__wrapped__ = other

    def __call__(self, iterator):
        """See `keras.Model.train_function`."""
        if self._fit.is_running:
            return self._other(iterator)
        self._model().train_function = self._plain
        return self._plain(iterator)
