"""A model whose steps XLA compiles on several devices."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import in_place
from tfscale.adapters.model import MeshModel
from tfscale.graphs.function_options import clusters
from tfscale.graphs.function_options import outermost


class CompiledModel(MeshModel):
    """A model with `jit_compile=True`, which Keras compiles for one device.

    Its functions are compiled in clusters, see `graphs/xla_clusters.py`.
    """

    jit_compile: bool
    train_function: Any
    test_function: Any
    predict_function: Any

    def make_train_function(self, force=False):
        """See `keras.Model`; with clusters if `jit_compile` is True."""
        with self._not_by_keras() as contexts:
            super().make_train_function(force)
            self.train_function = outermost(self.train_function, *contexts)

    def make_test_function(self, force=False):
        """See `keras.Model`; with clusters if `jit_compile` is True."""
        with self._not_by_keras() as contexts:
            super().make_test_function(force)
            self.test_function = outermost(self.test_function, *contexts)

    def make_predict_function(self, force=False):
        """See `keras.Model`; with clusters if `jit_compile` is True."""
        with self._not_by_keras() as contexts:
            super().make_predict_function(force)
            self.predict_function = outermost(self.predict_function, *contexts)

    @contextlib.contextmanager
    def _not_by_keras(self):
        is_compiled = self.jit_compile
        self.jit_compile = False
        try:
            yield [clusters] if is_compiled else []
        finally:
            self.jit_compile = is_compiled


def predicting_in_clusters(function: Callable) -> Callable:
    """Keras' function to predict, which it compiles for one device.

    It is that of a model which has not been trained, and so is no
    `CompiledModel`: `predict` does not say to a strategy which model it is.
    """
    predict = inspect.unwrap(function)

    @functools.wraps(predict)
    def call(data):
        data = keras.tree.map_structure(_without_optionals, data)
        with tf.xla.experimental.jit_scope():
            return predict(data)

    return call


def _without_optionals(value):
    return None if isinstance(value, tf.experimental.Optional) else value


def adapt_compiled_model(model: keras.Model) -> None:
    """Has XLA compile the steps of a model on several devices."""
    in_place.put(model, CompiledModel)
