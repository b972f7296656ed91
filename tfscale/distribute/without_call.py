"""Models without a `call` of their own, such as GANs, are built by parts.

Under a strategy Keras calls a model that is not built before the first step,
to have its variables made: of one that is a `train_step` and parts, in vain.
"""

import keras

from tfscale import _internals


def build(model: keras.Model) -> None:
    """Has a model count as built if it has no `call`, but built parts.

    Raises:
        ValueError: If a part is not built.
    """
    if model.built or type(model).call is not keras.Model.call:
        return
    parts = [x for x in _internals.flatten_layers(model) if x is not model]
    unbuilt = [part.name for part in parts if not part.built]
    if unbuilt:
        raise ValueError(
            "The parts of a model without a `call` must have their variables "
            "before it trains under a strategy. Received: the model "
            f"{model.name!r}, whose parts {unbuilt} are not built. Begin a "
            "Sequential model with `keras.Input`, or call the part on a batch "
            "in the scope."
        )
    model.built = True
