"""Layers that draw random numbers, told to draw none.

Replicas and microbatches draw for rows of their own, so that no two meshes have
the same numbers. Which layers draw is declared by their seed generators, and
how much by attributes of Keras' names.
"""

import keras

from tfscale._internals import attributes

# Of `Dropout` and its relatives, of noise, and of cells.
_AMOUNTS = ("rate", "stddev", "dropout", "recurrent_dropout")


def draw_nothing(model: keras.Model) -> list[str]:
    """Sets what layers draw to zero; returns the paths of others that draw."""
    drawing = []
    for layer in attributes.flatten_layers(model):
        if not attributes.direct_generators(layer):
            continue
        amounts = [
            name
            for name in _AMOUNTS
            if isinstance(getattr(layer, name, None), int | float)
        ]
        for name in amounts:
            setattr(layer, name, 0.0)
        if not amounts:
            drawing.append(layer.path or layer.name)
    return drawing
