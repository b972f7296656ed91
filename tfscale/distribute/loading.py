"""Loads weights into a model on a mesh: all of them, or none.

Keras' loader raises in the end, after it has written all that fits. Here it
runs twice: on trial first, with all of its checks and nothing written, and
then in earnest. That reads the file twice, and needs no memory.

The user calls `load_weights` of a model that Keras made, in a scope that sees
its variables and never the model, and the loader asks nobody. So this is the
one place where tfscale replaces something of Keras: `keras.Model.load_weights`,
once there is a `MeshStrategy`. Of a model without variables on a mesh, and
with `skip_mismatch=True`, it is Keras' own method that runs, and once.
"""

import functools
import warnings

import keras
import tensorflow as tf

from tfscale.distribute.variable import MeshVariable
from tfscale.distribute.variable import on_trial


def load_all_or_nothing() -> None:
    """Replaces `keras.Model.load_weights`; a second call changes nothing."""
    load_weights = keras.Model.load_weights
    if hasattr(load_weights, "loads_all_or_nothing"):
        return

    @functools.wraps(load_weights)
    def call(self, filepath, skip_mismatch=False, **kwargs):
        if not skip_mismatch and _is_on_mesh(self):
            _try(functools.partial(load_weights, self), filepath, **kwargs)
        return load_weights(self, filepath, skip_mismatch, **kwargs)

    call.loads_all_or_nothing = True
    keras.Model.load_weights = call


def _try(load_weights, filepath, **kwargs):
    try:
        # What is to be warned of will be when it happens.
        with on_trial(), tf.device("CPU:0"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_weights(filepath, **kwargs)
    except FileNotFoundError:
        raise
    except Exception as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(
            "The weights of a model on a mesh are loaded all or none. Received:"
            f" {str(filepath)!r}, of which Keras says: {error}\n"
            "Nothing was changed. Load a whole file of the same model, saved "
            "on any mesh or none, or pass `skip_mismatch=True` to load the "
            "layers that fit."
        ) from error


def _is_on_mesh(model):
    return any(isinstance(v.value, MeshVariable) for v in model.variables)
