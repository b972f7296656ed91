"""Models whose variables Keras cannot create by calling them on data.

Keras does so before the first step under a strategy. It fails for a model
without a `call`, such as a GAN, and for one whose `train_step` passes other
inputs, such as noisy images and a time: their layers are built one by one.
"""

import keras

from tfscale._internals import attributes
from tfscale.mesh.models.wrapped_model import WrappedModel


def build(model: keras.Model) -> None:
    """Marks an unbuilt model as built if it has no `call`, but built layers.

    Raises:
        ValueError: If a layer is not built.
    """
    if model.__class__.call is not keras.Model.call:
        return
    layers = [x for x in attributes.flatten_layers(model) if x is not model]
    unbuilt = [layer.name for layer in layers if not layer.built]
    if unbuilt:
        raise ValueError(
            "The layers of a model without a `call` must be built before it "
            f"trains under a strategy. Received: the model {model.name!r} with "
            f"unbuilt layers {unbuilt}. Begin a Sequential model with "
            "`keras.Input`, or call the layer on a batch in the scope."
        )
    model.built = True


def builds_otherwise(model: keras.Model) -> bool:
    """Whether a model that could not be called on its data still trains.

    If so its optimizer is built now, its metrics in the first step. With Keras'
    `train_step` it would fail there too.
    """
    layers = [x for x in attributes.flatten_layers(model) if x is not model]
    if (
        isinstance(model, WrappedModel)
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
