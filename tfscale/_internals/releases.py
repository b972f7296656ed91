"""Differences between the releases of Keras that tfscale runs on.

All differences are here. The `IS_3_15` ones may be deleted when setup.cfg
requires Keras 3.16.
"""

import random
from collections.abc import Callable
from typing import Any

import keras

IS_3_15 = keras.__version__.startswith("3.15.")

# Whether a step draws its batch itself, in a graph.
TRACES_ITERATORS = IS_3_15

# The table of private names of the other releases, see `keras_names`.
KERAS = (
    ""
    if IS_3_15
    else """
trainers.data_adapters.array_data_adapter.ArrayDataAdapter.__init__
    _epoch: by which arrays are shuffled
trainers.data_adapters.py_dataset_adapter.PyDatasetAdapter.__init__
    _epoch: by which a `PyDataset` is shuffled
layers.layer.Layer
    _quantization_type_owner: the only class whose layers Keras quantizes
"""
)


def called_in_model(operation: Any, training: bool) -> Callable[..., Any]:
    """A layer or an operation, called as a model of a `training` calls it.

    Until 3.15 `training` is that of the model, also where a layer was given
    another one when the model was made. The nightly of 3.16 gives that one to
    all layers behind it too, which is not followed here.
    """
    if not isinstance(operation, keras.Layer):
        return operation

    def call(*args, **kwargs):
        given = kwargs.pop("training", None)
        is_given = given is not None and not IS_3_15
        return operation(
            *args, **kwargs, training=given if is_given else training
        )

    return call


def is_quantized_as_it_is(layer: Any) -> bool:
    """Whether Keras quantizes a layer of this class: of subclasses it does not.

    Until 3.15 they inherit a method that raises an error.
    """
    kind = layer.__class__
    owner = getattr(layer, "_quantization_type_owner", None)
    if owner is not None:
        return owner() is kind
    return all(
        getattr(base, "quantize", None) is not kind.quantize
        for base in kind.__bases__
    )


def quantize_of(layer: keras.Layer, method: Callable[..., Any]) -> Any:
    """Keras' `quantize` of a layer, where `method` is that of its class.

    Until 3.15 the constructor sets another one on each layer.
    """
    return vars(layer)["quantize"] if IS_3_15 else method


def epoch_of_order(adapter: Any) -> int | None:
    """The number by which a `PyDataset` or arrays are shuffled.

    Until 3.15 there is none: random states shuffle.
    """
    return getattr(adapter, "_epoch", None)


def set_epoch_of_order(adapter: Any, epoch: int | None) -> None:
    """Has epochs go on with a result of `epoch_of_order`."""
    if not IS_3_15 and epoch is not None:
        setattr(adapter, "_epoch", epoch)  # noqa: B010


def shuffle_batches(order: list[int], epoch: int | None) -> None:
    """Shuffles numbers of batches as Keras does in this epoch.

    Until 3.15 the seed is Python's random state.
    """
    drawing: Any = random if epoch is None else random.Random(epoch)
    drawing.shuffle(order)
