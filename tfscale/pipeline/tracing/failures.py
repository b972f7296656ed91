"""Names the layer and the stage in errors of a step."""

import contextlib
import re

import tensorflow as tf

# The message that TensorFlow is given for a loss that is not finite.
NOT_FINITE = "The loss of the batch is not finite"

# In names of operations: the stage, and after it the layer. In the backward,
# gradients have the name of what they are the gradient of.
_SCOPE = re.compile(r"\bstage_(\d+)/(?:gradients/stage_\d+/)?([^/\s}:]+)")

_TASK = re.compile(r"/job:\w+(?:/replica:\d+)?/task:\d+")


@contextlib.contextmanager
def noted(layer: str, stage: int):
    """Within it, exceptions of a layer's own code name the layer."""
    try:
        yield
    except Exception as error:
        error.add_note(f"In layer {layer!r} of pipeline stage {stage}.")
        raise


@contextlib.contextmanager
def explained(stages):
    """Within it, errors of the runtime name the layer and the stage.

    They keep TensorFlow's class, but for a `FloatingPointError` of the loss.
    """
    try:
        yield
    except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
        raise
    except tf.errors.OpError as error:
        message = error.message or ""
        task = _TASK.search(message)
        if isinstance(error, tf.errors.UnavailableError) and task:
            raise tf.errors.UnavailableError(
                error.node_def,
                error.op,
                "All processes that have stages must run until the training "
                f"ends. Received: {task[0]} is gone, with its stages. See its "
                "last output. Start all processes again; with "
                "`tfscale.callbacks.BackupAndRestore` they continue from the "
                f"last backup. {message}",
            ) from error
        if NOT_FINITE in message:
            found = "NaN" if "NaN" in message else "Inf"
            raise FloatingPointError(
                "The loss must be finite. Received: a batch with the loss "
                f"{found}. This batch changed no variable. Look for such "
                "values in the data, lower the learning rate, or clip "
                "gradients."
            ) from error
        match = _SCOPE.search(message)
        if match is None:
            raise
        stage, scope = match.groups()
        # TensorFlow may have numbered the name to make it unique.
        layer = next(
            (
                name
                for name in sorted(stages[int(stage)].layers, key=len)[::-1]
                if re.fullmatch(re.escape(name) + r"(_\d+)?", scope)
            ),
            scope,
        )
        raise type(error)(
            error.node_def,
            error.op,
            f"Layer {layer!r} of pipeline stage {stage} failed. The step was "
            "abandoned, and training can continue with another batch. "
            f"{message}",
        ) from error
