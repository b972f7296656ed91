"""Explains errors of a `train_step` that mixes shards with whole tensors."""

import contextlib
import re
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.adapters.model import StagedModel
from tfscale.variables.of_variable import sharding_of

_BACKWARD = re.compile(r"(^|/)(gradient_tape|gradients)/")


@contextlib.contextmanager
def explained(model: keras.Model | None) -> Iterator[None]:
    """Explains an error of a model's own `train_step`, as a decorator too."""
    try:
        yield
    except ValueError as error:
        if (
            model is None
            or isinstance(model, StagedModel)
            or attributes.is_step_of_keras(model.train_step)
        ):
            raise
        variables = model.trainable_variables
        sharded = [v.path for v in variables if sharding_of(v).is_sharded]
        graph = tf.compat.v1.get_default_graph()
        if (
            not sharded
            or not re.search("[Dd]imension|[Ss]hape", str(error))
            or not any(_BACKWARD.search(x.name) for x in graph.get_operations())
        ):
            raise
        raise ValueError(
            "Gradients of variables that model ranks divide, or replicas with "
            "zero_stage=3, are shards, and what a `train_step` adds to them or "
            "assigns must be of the same shape. Received: gradients of "
            f"{', '.join(sharded[:3])}, and an operation after the tape that "
            "failed. Put them together before: "
            "`gradients = tfscale.sum_gradients(gradients, variables)`, which "
            f"`optimizer.apply` takes as they are. It failed by: {error}"
        ) from error
