"""Finds the layer of a variable that Keras creates later than it was added.

A model with a custom `call` is built by running it, and the variables of its
layers are created afterwards. Then only the model's scope is open, which shows
neither the layer nor the path.
"""

import keras

from tfscale._internals import attributes
from tfscale._internals import symbols


def late_variable(initial_value) -> keras.Variable | None:
    """The Keras variable that is being created, if it is created late.

    `initial_value` is then a function that refers to it.
    """
    for cell in getattr(initial_value, "__closure__", None) or ():
        variable = cell.cell_contents
        if isinstance(variable, keras.Variable):
            path = f"{symbols.current_path()}/{variable.name}"
            return None if variable.path == path else variable
    return None


def layers_around(variable, layer) -> list[keras.Layer]:
    """The layers from below `layer` to the one that has a variable, or none."""
    return _chain(variable, layer, set()) or []


def _chain(variable, layer, seen):
    seen.add(id(layer))
    if any(each is variable for each in attributes.direct_variables(layer)):
        return []
    for sublayer in attributes.sublayers(layer):
        if id(sublayer) not in seen:
            found = _chain(variable, sublayer, seen)
            if found is not None:
                return [sublayer, *found]
    return None
