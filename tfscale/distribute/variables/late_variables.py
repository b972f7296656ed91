"""To which layer a variable belongs that Keras makes later than it was asked.

A model with a `call` of its own is built by running it, and all that its layers
want is made when that is over. Then only the model's own scope is open, and
neither the layer nor the path is what the scopes say.
"""

import keras

from tfscale._internals import attributes
from tfscale._internals import symbols


def late_variable(initial_value) -> keras.Variable | None:
    """The Keras variable that is being made, if it is made late.

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
