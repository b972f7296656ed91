"""The `fit` that runs: its epochs and callbacks, found once."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import keras

from tfscale._internals import fitting

# The logs that callbacks get: metrics by name, or None.
Logs = dict[str, Any] | None


class Fit:
    """A call of `fit`, by weak references.

    The `fit` of `model` has to run in this thread, in `on_train_begin` of one
    of its callbacks or later: else it is a RuntimeError.
    """

    def __init__(self, model: keras.Model):
        epochs, callbacks = fitting.running_fit(model)
        self._epochs = weakref.ref(epochs)
        self._callbacks = weakref.ref(callbacks)
        self._thread = threading.get_ident()

    @property
    def epochs(self) -> Any:
        """The `EpochIterator` of Keras."""
        return self._epochs()

    @property
    def callbacks(self) -> Any:
        """The `CallbackList` of Keras."""
        return self._callbacks()

    def callbacks_of(self, *kinds: type) -> list[Any]:
        """The callbacks of some classes."""
        return [c for c in self.callbacks.callbacks if isinstance(c, kinds)]

    @property
    def is_running(self) -> bool:
        """Whether `fit` runs; Keras does not tell callbacks of exceptions."""
        epochs = self.epochs
        return epochs is not None and fitting.is_running(epochs, self._thread)


class FitScopedFunction:
    """The train function `other` in the place of `plain` while a `fit` runs.

    It is the model's from when it is created to `end`, or to the first call
    outside of the `fit`: Keras tells callbacks nothing of an exception, and
    keeps the function.
    """

    def __init__(
        self,
        model: keras.Model,
        fit: Fit,
        plain: Callable[[Any], Any],
        other: Callable[[Any], Any],
    ):
        self._model: Any = weakref.ref(model)
        self._fit = fit
        self._plain = plain
        self._other = self.__wrapped__ = other
        model.train_function = self

    def __call__(self, iterator):
        """See `keras.Model.train_function`."""
        if self._fit.is_running:
            return self._other(iterator)
        self.end()
        return self._plain(iterator)

    def end(self) -> None:
        """Restores the plain function, if no other has replaced this one."""
        model = self._model()
        if model.train_function is self:
            model.train_function = self._plain
