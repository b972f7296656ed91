"""What the steps of a pipeline check of their data."""

import keras
import tensorflow as tf


def check_built(model: keras.Model, *parts) -> None:
    """Refuses to run before loss, metrics and optimizer have variables."""
    made = [*parts, model.optimizer]
    if all(part is None or part.built for part in made):
        return
    raise ValueError(
        "Loss, metrics and optimizer must have their variables before "
        "`strategy.run`, in which none can be made. Received: a step of "
        f"{model.name!r} before anything else. Call "
        "`model.test_on_batch(x, y)` on one batch first."
    )


def check_batch(batch) -> None:
    """Refuses tensors that cannot be divided into microbatches."""
    for tensor in keras.tree.flatten(batch):
        if isinstance(tensor, tf.SparseTensor | tf.RaggedTensor):
            raise ValueError(
                "What goes through a pipeline must be dense. Received: a "
                f"{type(tensor).__name__} of shape {tensor.shape}. Make it "
                "dense in the input pipeline: `dataset.map` with "
                "`tf.sparse.to_dense(x)`, or with `x.to_tensor(shape=[None, "
                "length])` and a mask for the padding."
            )


def check_preprocessed(model: keras.Model, inputs) -> None:
    """Refuses strings that a task's own preprocessor should have had."""
    if getattr(model, "preprocessor", None) is None:
        return
    if any(
        getattr(x, "dtype", None) == tf.string
        for x in keras.tree.flatten(inputs)
    ):
        raise ValueError(
            "What goes through a pipeline must be preprocessed before: the "
            "preprocessor of a task is not one of its layers. Received: "
            f"strings, for {model.name!r}. Use "
            "`dataset.map(task.preprocessor)` with the task that was wrapped."
        )
