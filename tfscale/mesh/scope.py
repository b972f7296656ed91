"""The scope of a strategy, which adds advice to errors of TensorFlow."""

import re

import keras

from tfscale.mesh.models import without_call

# TensorFlow's messages about variables of different strategies, or of none.
_ERRORS = (
    "Mixing different tf.distribute.Strategy objects",
    "must only be passed a variable created in this tf.distribute.Strategy",
)
_NO_REPLICA = "is not available outside the replica context"
_VARIABLE = re.compile(r"<tf.Variable '([^']+)'")


class Scope:
    """Passes on a scope of TensorFlow; explains an error that leaves it.

    Keras enters it in `fit` and `evaluate` too, before the first step.
    """

    def __init__(self, scope, model: keras.Model | None = None):
        self._scope = scope
        self._model = model

    def __enter__(self):
        try:
            return self._scope.__enter__()
        except RuntimeError as error:
            if _ERRORS[0] not in str(error):
                raise
            raise ValueError(
                "Scopes of different strategies must not be nested. Received: "
                "the scope of a `MeshStrategy` in another strategy's. Leave "
                "the outer scope first; one strategy covers all axes of its "
                "mesh. (`fit` enters the scope in which a model was created.)"
            ) from error

    def __exit__(self, kind, error, traceback):
        self._scope.__exit__(kind, error, traceback)
        if isinstance(error, ValueError) and _NO_REPLICA in str(error):
            raise ValueError(
                "A custom training step must run on replicas. Received: the "
                "value or the gradient of a variable, outside of "
                "`strategy.run`. Put the step into a function `step` and call "
                "`strategy.run(step, args=(x, y))`, with a batch of "
                "`strategy.experimental_distribute_dataset(dataset)`."
            ) from error
        if isinstance(error, RuntimeError | ValueError) and any(
            text in str(error) for text in _ERRORS
        ):
            found = _VARIABLE.search(str(error))
            received = (
                f"{found[1]!r}, made outside of the scope"
                if found
                else "a model and an optimizer, and one of them was created "
                "outside"
            )
            raise ValueError(
                "Everything that trains under a strategy must be created in "
                f"its scope. Received: {received}. Put the model, `compile`, "
                "the optimizer and `enable_lora` under `with "
                "strategy.scope():`."
            ) from error
        # The return value would suppress the error.
        model = self._model
        if model is None or not isinstance(error, RuntimeError | ValueError):
            return False
        return without_call.builds_otherwise(model)
