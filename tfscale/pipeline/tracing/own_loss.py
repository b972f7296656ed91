"""A `compute_loss` of the user's own, called on each microbatch.

It is called as Keras calls it, on an object that is the model but for some
members: the losses given to `compile` come without the scale that Keras puts on
them for replicas, and what layers have added is a zero in whose place the
pipeline adds it. What is returned is then taken apart into its summands:

    compute_loss = sum of compile's losses + what layers add + the rest

The first count by their own divisors and the second as everywhere in a
pipeline (whole_batch, batch_loss.py), as far as they are summands. The rest,
which is all of it if they are scaled, say, is taken for a mean over the rows.
"""

import dataclasses
import warnings
from typing import Any

import keras
import tensorflow as tf

from tfscale import _internals
from tfscale.whole_batch import losses
from tfscale.whole_batch.part import no_part

# What makes a sum of scalars, and their inputs that are summands.
_ADDS = {
    "Add": 2,
    "AddV2": 2,
    "AddN": None,
    "Cast": 1,
    "Identity": 1,
    "Pack": None,
    "Sum": 1,
}


@dataclasses.dataclass
class OwnLoss:
    """The losses of a model with a `compute_loss` of its own.

    Attributes:
        model: The `PipelineModel`, whose `compute_loss` is called.
        compile_loss: Its `CompileLoss`, or None.
        keeps_added: Whether what layers and regularisers add is a summand of
            what was returned last.
    """

    model: keras.Model
    compile_loss: Any
    keeps_added: bool = True
    has_rest: bool = False
    _has_warned: bool = False

    def __call__(
        self, x, y, y_pred, sample_weight, training: bool
    ) -> tuple[losses.CompiledLoss, ...]:
        """Every loss of one microbatch; those of `compile` first."""
        recorded, totals = [], []
        added = tf.identity(tf.zeros(()))

        def compiled(y, y_pred, sample_weight=None):
            recorded[:] = losses.compiled_losses(
                self.compile_loss, y, y_pred, sample_weight
            )
            values = [each.weight * each.value for each in recorded]
            totals.append(tf.identity(tf.add_n(values)))
            return totals[-1]

        view = _internals.view(
            self.model,
            **_internals.with_losses(
                lambda: compiled if self.compile_loss else None,
                lambda: [added],
            ),
        )
        # The microbatch is all there is, not a part of one.
        with no_part():
            value = view.compute_loss(
                x, y, y_pred, sample_weight, training=training
            )
        value = tf.convert_to_tensor(value)
        if value.shape.rank != 0:
            raise ValueError(
                "A `compute_loss` must return a scalar. Received: shape "
                f"{value.shape} of {self.model.name!r}. Return its mean over "
                "the rows."
            )
        summands, adds = _summands(value, {added.ref(), *map(_ref, totals)})
        self.keeps_added = summands.count(added.ref()) == 1 and all(
            operation in adds for operation in added.consumers()
        )
        summands = [ref for ref in summands if ref != added.ref()]
        if len(totals) == 1 and totals[0].ref() in summands:
            summands.remove(totals[0].ref())
            if not summands:
                return tuple(recorded)
            value -= tf.cast(totals[0], value.dtype)
        else:
            recorded = self._only_shown(recorded)
        return (*recorded, self._mean_over_rows(value, (y, x)))

    def _only_shown(self, recorded):
        """The single losses of several outputs, which `fit` logs."""
        if not recorded and self.compile_loss is not None:
            recorded = [
                losses.CompiledLoss(
                    metric.name, tf.zeros(()), tf.ones(()), 0.0, True, False
                )
                for metric in self.compile_loss.metrics
            ]
        return [dataclasses.replace(each, weight=0.0) for each in recorded]

    def _mean_over_rows(self, value, tensors):
        self.has_rest = True
        return losses.CompiledLoss(
            name="compute_loss",
            value=tf.cast(value, tf.float32),
            divisor=losses.num_rows(tensors),
            weight=1.0,
            is_sum=False,
            is_reduced=False,
        )

    def warn_of_rest(self) -> None:
        """Warns, once, if something is taken for a mean over rows."""
        if not self.has_rest or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            "What a `compute_loss` returns, but for summands that are losses "
            "given to `compile`, is taken for a mean over the rows of a "
            f"microbatch. Received: that of {self.model.name!r}. If it is a "
            "sum, divides by something else than rows, or compares rows, "
            "numbers differ from one device: train on one replica with "
            "`num_microbatches=1`, or return what "
            "`super().compute_loss(...)` returns.",
            stacklevel=2,
        )


def _ref(tensor):
    return tensor.ref()


def _summands(value, known):
    """References to what a scalar is the sum of, and the operations between.

    Args:
        value: The scalar.
        known: References to tensors that are not to be taken apart.
    """
    found, operations, stack = [], set(), [value]
    while stack:
        tensor = stack.pop()
        if tensor.ref() in known:
            found.append(tensor.ref())
        elif tensor.op.type not in _ADDS:
            if tf.get_static_value(tensor) != 0:
                found.append(tensor.ref())
        else:
            operations.add(tensor.op)
            stack += tensor.op.inputs[: _ADDS[tensor.op.type]]
    return found, operations
