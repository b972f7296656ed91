"""Models that Keras cannot call on their data, to have their variables made.

It does so before the first step under a strategy. In vain, of one without a
`call` of its own, such as a GAN, and of one whose `train_step` calls it on
something else, such as noisy images and a time: these are built by parts.
"""

import keras

from tfscale._internals import attributes
from tfscale.distribute.models.wrapped_model import WrappedModel


def build(model: keras.Model) -> None:
    """Has a model count as built if it has no `call`, but built parts.

    Raises:
        ValueError: If a part is not built.
    """
    if model.built or model.__class__.call is not keras.Model.call:
        return
    layers = [x for x in attributes.flatten_layers(model) if x is not model]
    unbuilt = [layer.name for layer in layers if not layer.built]
    if unbuilt:
        raise ValueError(
            "The parts of a model without a `call` must have their variables "
            "before it trains under a strategy. Received: the model "
            f"{model.name!r}, whose parts {unbuilt} are not built. Begin a "
            "Sequential model with `keras.Input`, or call the part on a batch "
            "in the scope."
        )
    model.built = True


def builds_otherwise(model: keras.Model, error: BaseException | None) -> bool:
    """Whether a model that could not be called on its data trains all the same.

    If so its optimizer is built, and what is compiled is left to the first
    step. Without a `train_step` of its own it would fail there too.
    """
    layers = [x for x in attributes.flatten_layers(model) if x is not model]
    if (
        not isinstance(error, RuntimeError | ValueError)
        or isinstance(model, WrappedModel)
        or model.__class__.train_step is keras.Model.train_step
        or not layers
        or not all(layer.built for layer in layers)
    ):
        return False
    model.built = True
    if model.optimizer is not None:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
    return True
