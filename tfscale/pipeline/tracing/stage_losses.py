"""The losses of the last stage: those of `compile`, or a `compute_loss`."""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import instances
from tfscale.context import step_context
from tfscale.pipeline.tracing import keys
from tfscale.step import losses
from tfscale.step.batch_shard import BatchShard


@dataclasses.dataclass(frozen=True)
class Targets:
    """The targets of the losses, in the last stage.

    Attributes:
        structure: `(y, sample_weight)`, with anything but None where tensors
            go; with a `model` `(y, sample_weight, x)`.
        specs: `tf.TensorSpec`s of these tensors, flattened.
        pack: Puts the model's flattened outputs into their structure.
        model: The `PipelineModel` if it has a `compute_loss` of its own.
    """

    compile_loss: Any
    structure: Any
    specs: tuple[tf.TensorSpec, ...]
    pack: Any
    model: keras.Model | None = None


def find(
    targets: Targets,
    outputs: Sequence[tf.Tensor],
    argument: Callable[..., tf.Tensor],
    *,
    training: bool,
) -> tuple[tuple[losses.CompiledLoss, ...], tf.Tensor | None]:
    """The losses of a microbatch, in the graph of the last stage.

    Also returns the gradient of a custom `compute_loss` by what layers add to
    it; None if there is none. `outputs` of the model are flattened; `argument`
    returns the placeholder of a key, a shape and a dtype.
    """
    tensors = [
        argument(keys.Target(i), spec.shape, spec.dtype)
        for i, spec in enumerate(targets.specs)
    ]
    rest = iter(tensors)
    y, sample_weight, *x = keras.tree.map_structure(
        lambda x: None if x is None else next(rest), targets.structure
    )
    y_pred = targets.pack(outputs)
    by_added = None
    if targets.model is not None:
        args = *x, y, y_pred, sample_weight
        found, by_added = _of_user(targets, args, argument, training)
    else:
        found = losses.compiled_losses(
            targets.compile_loss, y, y_pred, sample_weight
        )
    vectors = [loss.name for loss in found if loss.is_vector]
    if vectors and len(vectors) < len(found):
        raise ValueError(
            "All losses of a pipeline must be reduced, or none: Keras adds a "
            "scalar to every element of an unreduced loss. Received: "
            f"reduction='none' for {vectors[0]!r} of {len(found)} losses. Use "
            "reduction='sum_over_batch_size'."
        )
    return found, by_added


def _of_user(targets, args, argument, training):
    """The losses of `compile`, then the user's `compute_loss`.

    Called as on replicas (step/batch_shard.py). A zero stands for the losses
    that layers add, which the pipeline adds.
    """
    compiled = []
    totals = argument(keys.TOTALS, [None], losses.precision())

    def total(divisors):
        size = divisors.shape[0]
        found = totals[len(compiled) : len(compiled) + size]
        return tf.ensure_shape(found, [size])

    rows = argument(keys.ROWS, [], losses.precision())
    all_rows = argument(keys.ALL_ROWS, [], losses.precision())
    batch_shard = BatchShard(
        rows, total, 1, known_rows=all_rows, compiled=compiled
    )
    added = tf.identity(tf.zeros((), losses.precision()))
    model = instances.view(
        targets.model,
        **attributes.with_losses(lambda: targets.compile_loss, lambda: [added]),
    )
    options = {"training": training}
    with step_context.within(batch_shard=batch_shard):
        value = model.compute_loss(*args, **options)
    value = tf.convert_to_tensor(value)
    if value.shape.rank != 0:
        raise ValueError(
            "A `compute_loss` must return a scalar. Received: shape "
            f"{value.shape} of {targets.model.name!r}. Return its mean "
            "over the rows."
        )
    (by_added,) = tf.gradients(value, added)
    custom_loss = losses.CompiledLoss(
        name="compute_loss",
        value=tf.cast(value, losses.precision()),
        divisor=losses.num_rows(args),
        weight=1.0,
        is_sum=False,
        is_reduced=False,
    )
    # Losses of `compile` are only logged.
    shown = [dataclasses.replace(each, weight=0.0) for each in compiled]
    return (*shown, custom_loss), by_added
