"""Loads the weights of a pipeline: all of them, or none.

Keras' loader writes all weights that fit before it raises. So it runs twice:
first on trial, with all of its checks and without writing. That reads the file
twice, and needs no memory.

A plain model on a mesh loads as Keras does.
"""

import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale.context import step_context


def load_all_or_nothing(
    load_weights: Callable[..., None], filepath: Any, **kwargs: Any
) -> None:
    """Loads weights from a file that has all weights of a model.

    Raises a FileNotFoundError, an OSError of a damaged file, or a ValueError of
    another model; nothing is changed then.
    """
    on_trial = step_context.Update(is_on_trial=True)
    try:
        # Warnings come with the second run.
        with (
            step_context.within(update=on_trial),
            tf.device("CPU:0"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            load_weights(filepath, **kwargs)
    except FileNotFoundError:
        raise
    except Exception as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(
            "A pipeline loads all of its weights or none. Received: "
            f"{str(filepath)!r}, and from Keras: {error}\nNothing was changed. "
            "Load a whole file of the same model, saved on any mesh or "
            "without one, or pass `skip_mismatch=True` to load the layers "
            "that fit."
        ) from error
    load_weights(filepath, **kwargs)
