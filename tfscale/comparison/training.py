"""One side of a comparison: a model that is built, and what it computes."""

from collections.abc import Callable
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import datasets
from tfscale._internals import fitting
from tfscale.adapters.optimizer import optimizers_of
from tfscale.adapters.row_optimizer import adapt_dense_optimizer
from tfscale.comparison import numbers
from tfscale.comparison.memory import within_memory
from tfscale.comparison.numbers import Key

_SEED = 1


def reset() -> None:
    """Same names, seeds and initial weights from here on."""
    # A collection of garbage takes a second once there are hundreds of traced
    # functions; Python's own is enough.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(_SEED)


class Training:
    """A model built on one device, or in the scope of a strategy.

    `build_model` returned `inner`; `trained` is the same, or its wrapper.

    Attributes:
        drawing: Paths of layers that draw random numbers nevertheless.
        initial: Weights before the first step, by path.
        numbers: For each number its value after each step, or the only one.
        gradients: On one device, the largest magnitude of each gradient.
    """

    def __init__(
        self,
        build_model: Callable[[], keras.Model],
        data: tf.data.Dataset,
        strategy: tf.distribute.Strategy | None = None,
        wrap: Callable[[keras.Model], keras.Model] | None = None,
    ):
        self._data = data
        self.numbers: dict[Key, list[np.ndarray]] = {}
        self.gradients: dict[str, float] = {}
        self._largest: dict[int, tf.Variable] = {}
        reset()
        scope = strategy.scope() if strategy else within_memory()
        with scope:
            self.inner = self.trained = _compiled(build_model(), "build_model")
            self.drawing = draw_nothing(self.inner)
            if wrap is not None:
                self.trained = _compiled(wrap(self.inner), "wrap")
            self._build()
            if strategy is None:
                self._be_one_device()
        self.initial = numbers.values_of(self.inner.variables)

    def _build(self):
        """Creates what `fit` would create in its first step."""
        model = self.inner
        has_call = model.__class__.call is not keras.Model.call
        if has_call and not all(
            layer.built for layer in attributes.flatten_layers(model)
        ):
            spec = datasets.spec_of_batch(self._data.element_spec)
            fitting.build(self.trained, spec)

    def _be_one_device(self):
        model = self.trained
        self._largest = {
            id(v): tf.Variable(0.0, dtype="float64", trainable=False)
            for v in model.trainable_variables
        }
        # As Keras does under a strategy. On one device it is done within the
        # first step, where an initial value becomes an assignment in every
        # step.
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        for optimizer in optimizers_of(model):
            optimizer = getattr(optimizer, "inner_optimizer", optimizer)
            adapt_dense_optimizer(optimizer, self._largest)

    def evaluate(self) -> None:
        """Notes what `evaluate` returns."""
        logs = self.trained.evaluate(self._data, verbose=0, return_dict=True)
        self._note("evaluate", {("log", n): v for n, v in logs.items()})

    def predict(self) -> None:
        """Notes what `predict` returns."""
        outputs = self.trained.predict(self._data, verbose=0)
        for path, value in keras.tree.flatten_with_path(outputs):
            name = "/".join(map(str, path)) or "output"
            self._note("predict", {("output", name): value})

    def fit(self, callbacks: Sequence[keras.callbacks.Callback] = ()) -> None:
        """Trains; notes variables and logs after each step."""
        keras.utils.set_random_seed(_SEED)

        def note(batch, logs):
            found: dict = numbers.weights_and_slots(self.inner, self.trained)
            found |= {("log", n): v for n, v in (logs or {}).items()}
            self._note("fit", found)

        noting = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        history = self.trained.fit(
            self._data,
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks, noting],
        )
        self._note(
            "fit", {("log", n): v[-1] for n, v in history.history.items()}
        )
        for variable in self.inner.trainable_variables:
            seen = self._largest.get(id(variable))
            if seen is not None:
                self.gradients[variable.path] = float(seen)

    def _note(self, phase, found):
        for (kind, name), value in found.items():
            key = Key(phase, kind, name)
            self.numbers.setdefault(key, []).append(np.array(value))


def _compiled(model, argument):
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`{argument}` must return a `keras.Model`. Received: {model!r}."
        )
    if not model.compiled:
        raise ValueError(
            f"`{argument}` must return a compiled model. Received: "
            f"{model.name!r}, which is not. Call `compile` in `build_model`; a "
            "`PipelineModel` keeps it."
        )
    return model


# Of `Dropout` and its relatives, of noise, and of cells.
_AMOUNTS = ("rate", "stddev", "dropout", "recurrent_dropout")


def draw_nothing(model: keras.Model) -> list[str]:
    """Sets what layers draw to zero; returns the paths of others that draw."""
    drawing = []
    for layer in attributes.flatten_layers(model):
        if not attributes.direct_generators(layer):
            continue
        amounts = [
            name
            for name in _AMOUNTS
            if isinstance(getattr(layer, name, None), int | float)
        ]
        for name in amounts:
            setattr(layer, name, 0.0)
        if not amounts:
            drawing.append(layer.path or layer.name)
    return drawing
