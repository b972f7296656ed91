"""A model whose replicas share the trace of its call."""

from typing import Any

import keras

from tfscale._internals import attributes
from tfscale._internals import in_place
from tfscale._internals import instances
from tfscale.adapters.model import MeshModel
from tfscale.graphs.function_options import assembled
from tfscale.graphs.function_options import outermost

# Their updates have branches, or assign what no gradient goes into, so that
# each replica has its own.
_NOT_SHARED = (keras.optimizers.LossScaleOptimizer, keras.optimizers.Nadam)
# They call code of a user's or functions of a graph, assign weights, or may
# have a table.
_NOT_PURE = (
    keras.layers.Lambda,
    keras.layers.RNN,
    keras.layers.SpectralNormalization,
    keras.layers.IntegerLookup,
    keras.layers.StringLookup,
    keras.layers.TextVectorization,
)
# With several groups each is a function that XLA compiles.
_CONVOLUTIONS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
)


def can_share(extended: Any, model: keras.Model) -> bool:
    """Whether the call of a model is known to be the same on all replicas.

    In Keras' own step, of a functional model of Keras' own layers, whose
    replicas are of one process and have whole weights and slots. Of several
    outputs one may have no loss, and what leads to it no gradient.
    """
    functional = attributes.functional_of(model)
    return (
        functional is not None
        and len(functional.outputs) == 1
        and extended.num_replicas > 1
        and extended.num_model_ranks == 1
        and extended.workers is None
        and extended.optimizer_states.stage == 0
        and not extended.optimizer_states.are_on_host
        and not model.jit_compile
        and attributes.is_step_of_keras(model.train_step)
        and not isinstance(model.optimizer, _NOT_SHARED)
        and all(map(_is_of_keras, functional.operations))
        and all(map(_is_of_keras, attributes.flatten_layers(model)[1:]))
    )


def _is_of_keras(operation):
    """Whether an operation is Keras' own, and knows no other replica's rows."""
    values = instances.attributes_of(operation)
    return (
        _is_in_keras(operation.__class__)
        and "call" not in values
        and not isinstance(operation, _NOT_PURE)
        and not (isinstance(operation, _CONVOLUTIONS) and operation.groups > 1)
        and not getattr(operation, "synchronized", False)
        and getattr(operation, "activity_regularizer", None) is None
        and getattr(operation, "quantization_mode", None) is None
        and all(map(_is_in_keras, filter(callable, values.values())))
    )


def _is_in_keras(value):
    module = getattr(getattr(value, "func", value), "__module__", None)
    return module is not None and module.split(".")[0] == "keras"


class SharedModel(MeshModel):
    """A model whose steps are made of what Grappler has optimized."""

    train_function: Any

    def make_train_function(self, force=False):
        """See `keras.Model`; of an optimized call if replicas share it."""
        super().make_train_function(force)
        if can_share(self.distribute_strategy.extended, self):
            self.train_function = outermost(self.train_function, assembled)


def adapt_shared_model(model: keras.Model) -> None:
    """Has a step not be optimized again, whose pieces have been."""
    in_place.put(model, SharedModel)
