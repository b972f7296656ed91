"""The scope of a strategy, in which errors of TensorFlow say what to do."""

import re

# What TensorFlow says of a variable of one strategy that meets another one's,
# or none's.
_ERRORS = (
    "Mixing different tf.distribute.Strategy objects",
    "must only be passed a variable created in this tf.distribute.Strategy",
)
_VARIABLE = re.compile(r"<tf.Variable '([^']+)'")


class Scope:
    """Passes on a scope of TensorFlow; explains an error that leaves it.

    Keras enters it in `fit` and `evaluate` too, before the first step.

    Args:
        scope: What `tf.distribute.Strategy.scope` returns.
    """

    def __init__(self, scope):
        self._scope = scope

    def __enter__(self):
        return self._scope.__enter__()

    def __exit__(self, kind, error, traceback):
        self._scope.__exit__(kind, error, traceback)
        if isinstance(error, RuntimeError | ValueError) and any(
            text in str(error) for text in _ERRORS
        ):
            found = _VARIABLE.search(str(error))
            received = (
                f"{found[1]!r}, made outside of the scope"
                if found
                else "a model and an optimizer, one of which was made outside "
                "of the scope"
            )
            raise ValueError(
                "What trains under a strategy must be made in its scope. "
                f"Received: {received}. Put all that makes variables under "
                "`with strategy.scope():`, that is the model, `compile` and "
                "its optimizer, and `enable_lora`."
            ) from error
