"""Keeps the losses of layers separate for each rank and replica.

A Keras layer holds the losses of its last call (`add_loss`, activity
regularizers), and a model forgets them where it is called again. Ranks and
replicas are threads that call one model in turns, from one collective to the
next: after each, a thread would find the losses of another.
"""

import contextlib
import threading

import keras

from tfscale._internals import attributes

_thread = threading.local()


@contextlib.contextmanager
def kept(layers=None):
    """Within it other threads run; after it, layers have this one's losses.

    By default these are the layers of all models that this thread has entered.
    """
    layers = _layers() if layers is None else layers
    losses = [list(attributes.noted_losses(layer)) for layer in layers]
    yield
    for layer, before in zip(layers, losses):
        attributes.noted_losses(layer)[:] = before


def _layers():
    """The layers of all models that have run a collective on this thread."""
    models = _thread.__dict__.setdefault("models", {})
    callers = attributes.name_scope_callers()
    if not callers:
        # In the backward: losses have been read.
        return []
    model = callers[0]
    if isinstance(model, keras.layers.Layer) and id(model) not in models:
        models[id(model)] = attributes.flatten_layers(model)
    return [layer for layers in models.values() for layer in layers]
