"""A compiled model, loaded or made, goes on as a pipeline."""

import keras

from tfscale import _internals


def compile_arguments(model: keras.Model) -> dict:
    """What a compiled model was compiled with, for `compile` of its pipeline.

    The variables of the model are where they stay. An optimizer with slots is
    replaced by one with slots of the same values beside these variables.
    """
    arguments = _internals.compile_arguments(model)
    if not arguments["jit_compile"]:
        # What Keras makes of "auto" under a strategy.
        arguments["jit_compile"] = "auto"
    arguments["optimizer"] = _moved(model.optimizer, model.trainable_variables)
    arguments["auto_scale_loss"] = False  # it has been, if it was to be
    return arguments


def _moved(optimizer, variables):
    if optimizer is None or not optimizer.built:
        return optimizer
    moved = optimizer.__class__.from_config(optimizer.get_config())
    moved.build(variables)
    for new, old in zip(moved.variables, optimizer.variables, strict=True):
        new.assign(old.numpy())
    return moved
