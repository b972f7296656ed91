"""Freezes the leading layers of a model as they converge."""

import collections
import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfscale.callbacks.gradient_accumulation import GradientAccumulation
from tfscale.callbacks.gradient_noise_scale import GradientNoiseScale
from tfscale.fit.fit import Fit
from tfscale.fit.fit import Logs
from tfscale.mesh.models.wrapped_model import WrappedModel
from tfscale.pipeline.stages.graph import flatten_model


class LayerFreezing(keras.callbacks.Callback):
    """Freezes leading layers whose weights hardly change any more.

    At the end of an epoch it compares how far the weights of a layer have moved
    in it with how far they moved in the first one, each divided by the mean
    learning rate of its epoch. Where this ratio is below `threshold` the layer
    gets `trainable = False`, if all layers before it have too: only then a step
    needs no backward for it. A `PipelineModel` is cut anew, because stages of
    frozen layers cost less. The layers stay frozen when `fit` has ended;
    `tfscale.cut` trains the others on cached activations.

    The ratio needs no gradients, so any step and any strategy will do.
    `frozen_layers`, the number of layers that it has frozen, is in the logs of
    each epoch. `tfscale.callbacks.BackupAndRestore` saves its state.

    Args:
        threshold: Float above 0, of the ratio. Smaller ones freeze later.
        start: Float from 0 to 1, the share of the epochs to wait for.
        layers: Names of the layers that may be frozen. Defaults to all but the
            last one with weights, which always stays trainable.

    Raises:
        ValueError: If an argument makes no sense. When `fit` begins, if the
            model is not functional, no layer can be frozen, one shares its
            weights with another, or something else is trained before one of
            `layers`; with `GradientNoiseScale`, whose gradients would become
            those of fewer weights; or with an optimizer that needs all of its
            weights, because of `use_ema` or as a `MultiOptimizer`.

    Reference: Liu et al., AutoFreeze (2021), section 4, whose signal is the
    change of gradients; He et al., PipeTransformer (2021), section 3.1.

    Example:

    >>> import numpy as np
    >>> model = keras.Sequential(
    ...     [keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(3))]
    ... )
    >>> model.compile("sgd", "mse")
    >>> freezing = LayerFreezing(threshold=10.0, start=0.5)
    >>> x = np.ones((8, 4))
    >>> history = model.fit(x, x, epochs=4, verbose=0, callbacks=[freezing])
    >>> history.history["frozen_layers"]
    [0, 2, 2, 2]
    """

    def __init__(
        self,
        threshold: float,
        start: float = 0.5,
        layers: Sequence[str] | None = None,
    ):
        super().__init__()
        if not threshold > 0 or not 0 <= start <= 1:
            raise ValueError(
                "`threshold` must be above 0 and `start` from 0 to 1. "
                f"Received: threshold={threshold}, start={start}."
            )
        self.threshold = threshold
        self.start = start
        self.layers = None if layers is None else list(layers)
        self._candidates: list[keras.Layer] = []
        self._num_frozen = 0
        # Of each candidate: its weights when the epoch began, and how far they
        # moved in the first one, for a learning rate of 1.
        self._weights: list[list[np.ndarray]] = []
        self._first_changes: list[float] = []
        self._first_rate: float | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Finds the layers that may be frozen."""
        if Fit(self.model).callbacks_of(GradientNoiseScale):
            raise ValueError(
                "`GradientNoiseScale` needs the gradients of all weights. "
                "Received: `GradientNoiseScale` with `LayerFreezing`. Remove "
                "one."
            )
        _check_optimizer(self.model)
        frozen = list(
            itertools.takewhile(
                lambda layer: not layer.trainable,
                self._candidates[: self._num_frozen],
            )
        )
        self._candidates = _leading_layers(self.model, self.layers, frozen)
        self._num_frozen = sum(layer in frozen for layer in self._candidates)
        self._weights = [_values(layer) for layer in self._candidates]
        self._first_changes = []

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Forgets the learning rate of the epoch before."""
        self._first_rate = None

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Notes the learning rate of the first step of the epoch."""
        if self._first_rate is None:
            self._first_rate = self._learning_rate()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Freezes layers that have converged."""
        changes = self._changes()
        if not self._first_changes:
            self._first_changes = changes
        num_frozen = self._num_frozen
        if epoch + 1 >= self.start * self.params["epochs"]:
            for change, first in zip(
                changes[num_frozen:], self._first_changes[num_frozen:]
            ):
                if not change < self.threshold * first:  # nor if it is NaN
                    break
                num_frozen += 1
        self._freeze(num_frozen)
        if logs is not None:
            logs["frozen_layers"] = self._num_frozen

    def _changes(self):
        """How far each candidate moved in the epoch, for a rate of 1."""
        rate = (self._first_rate + self._learning_rate()) / 2
        changes = []
        for index, layer in enumerate(self._candidates):
            if index < self._num_frozen:
                changes.append(0.0)
                continue
            before, now = self._weights[index], _values(layer)
            self._weights[index] = now
            squares = sum(
                float(np.sum(np.square(a - b))) for a, b in zip(now, before)
            )
            changes.append(squares**0.5 / max(rate, 1e-30))
        return changes

    def _learning_rate(self):
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is None:
            return 1.0
        # Under Keras' strategies it is a variable of several devices.
        return float(keras.ops.convert_to_numpy(optimizer.learning_rate))

    def _freeze(self, num_frozen):
        if num_frozen == self._num_frozen:
            return
        for index, layer in enumerate(self._candidates):
            if (index < num_frozen) != (index < self._num_frozen):
                layer.trainable = index >= num_frozen
        self._num_frozen = num_frozen
        self.model.make_train_function(force=True)
        for callback in Fit(self.model).callbacks_of(GradientAccumulation):
            callback.on_train_begin()  # it runs another function

    def get_state(self) -> dict[str, Any]:
        """The state in a backup: numbers and arrays."""
        return {
            "num_frozen": self._num_frozen,
            "weights": self._weights[self._num_frozen :],
            "first_changes": self._first_changes,
            "first_rate": self._first_rate,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a result of `get_state`."""
        self._freeze(state["num_frozen"])
        self._weights[self._num_frozen :] = state["weights"]
        self._first_changes = state["first_changes"]
        self._first_rate = state["first_rate"]


def _check_optimizer(model):
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    use_ema = getattr(optimizer, "use_ema", False)
    if use_ema or isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise ValueError(
            "`LayerFreezing` needs an optimizer that can train some of its "
            f"weights. Received: a {type(optimizer).__name__} with "
            f"use_ema={use_ema!r}. Keras writes averages back in the order of "
            "all weights when `fit` ends, and a MultiOptimizer needs all "
            "gradients. Remove the callback, or change the optimizer."
        )


def _values(layer):
    return [
        keras.ops.convert_to_numpy(keras.ops.cast(weight, "float32"))
        for weight in layer.trainable_weights
    ]


def _leading_layers(model, names, frozen):
    """The layers with weights before which nothing else stays trainable.

    Only layers of `names`, or all but the last; `frozen` ones count.
    """
    if isinstance(model, WrappedModel):
        model = model.model
    calls = flatten_model(model).calls
    uses = collections.Counter(id(v) for call in calls for v in call.variables)
    found, reached = [], set()
    for call in calls:
        layer = call.operation
        is_trained = layer in frozen or any(v.trainable for v in call.variables)
        is_reached = not reached.isdisjoint(call.inputs)
        is_named = names is None or call.name in names
        if not is_trained or is_reached or not is_named:
            if is_trained or is_reached:
                reached.update(call.outputs)
            continue
        if any(uses[id(v)] > 1 for v in call.variables):
            raise ValueError(
                "A frozen layer must be called once and must not share "
                f"weights. Received: layer {call.name!r}, whose weights are "
                "also used elsewhere. Set its `trainable = False` before "
                "`fit`, or remove it, and all layers after it, from `layers`."
            )
        found.append(layer)
    missing = {*(names or ())} - {layer.name for layer in found}
    if missing:
        raise ValueError(
            "`layers` must have trainable weights and follow no layer that "
            "stays trainable. Received: "
            f"{', '.join(map(repr, sorted(missing)))}. Freezing these would "
            "skip no backward computation. The leading layers of the model "
            f"are {', '.join(repr(call.name) for call in calls[:5])}."
        )
    if not reached:
        found = found[:-1]
    if not found:
        raise ValueError(
            "The model must have a leading layer to freeze and a trained "
            f"layer after it. Received: model {model.name!r} with "
            f"layers={names}. Remove the callback."
        )
    return found
