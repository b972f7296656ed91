"""Tries whether a custom `compute_loss` is a mean over rows.

Replicas and microbatches average its results by rows. A loss that compares
rows, is a sum, or divides by something else would differ from one device.
"""

import warnings
import weakref

import keras
import numpy as np
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import instances
from tfscale.step.checks import trial

# Models that were tried; each is tried once.
_TRIED: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def check(model: keras.Model, args, kwargs) -> None:
    """Warns, once, of a `compute_loss` that is no mean over rows.

    Losses of layers count separately and are left out.
    """
    if (
        model in _TRIED
        or model.__class__.compute_loss is keras.Model.compute_loss
    ):
        return
    _TRIED.add(model)
    found = trial.complaint("was none", _is_mean, model, args, kwargs)
    if not found:
        return
    warnings.warn(
        "Of a batch in parts (replicas, microbatches) what a `compute_loss` "
        "returns, but for losses given to `compile` and what layers add, is "
        "taken for a mean over rows. Received: that of "
        f"{model.name!r}, {found} is a sum, divides by something else than "
        "rows, compares rows or draws random numbers. Numbers differ from one "
        "device: return a mean over rows, train in one part, or gather the "
        "rows of all replicas (docs/numbers.md).",
        stacklevel=2,
    )


def _mean_of_predictions(y, y_pred, sample_weight=None):
    """A stand-in for compiled losses, which may be scaled, but not squared."""
    first = keras.tree.flatten(y_pred)[0]
    return tf.reduce_mean(tf.cast(first, tf.float32))


def _is_mean(model, args, kwargs):
    view = instances.view(
        model,
        **attributes.with_losses(
            lambda: (
                None
                if attributes.compile_loss_of(model) is None
                else _mean_of_predictions
            ),
            lambda: [tf.zeros(())],
        ),
    )
    whole, inputs = trial.traced(view.compute_loss, args, kwargs, rows=4)
    half, _ = trial.traced(view.compute_loss, args, kwargs, rows=2)
    with tf.device("CPU:0"):
        expected, *_ = whole(*inputs)
        found = [
            half(*(x[rows] if x.shape.rank else x for x in inputs))[0]
            for rows in (slice(2), slice(2, 4))
        ]
    return np.allclose(np.mean(found, axis=0), expected, rtol=1e-4, atol=1e-6)
