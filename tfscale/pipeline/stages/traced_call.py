"""A call of a layer, traced for one example, and a key of its work."""

import json
from collections.abc import Callable

import keras
import tensorflow as tf


def trace_call(
    operation: Callable,
    args: tuple,
    kwargs: dict,
    scope: keras.StatelessScope | None = None,
) -> tf.types.experimental.ConcreteFunction:
    """The function of a call, for one example.

    `args` and `kwargs` have `keras.KerasTensor`s in place of tensors, whose
    unknown batch counts as 1. Variables are read from and assigned to in
    `scope`; by default they are read where they are, and nothing is assigned.
    """
    tensors = [x for x in keras.tree.flatten((args, kwargs)) if _is_tensor(x)]

    def call(*values):
        values = iter(values)
        call_args, call_kwargs = keras.tree.map_structure(
            lambda x: next(values) if _is_tensor(x) else x, (args, kwargs)
        )
        # No state, seed or `add_loss` of the traced call may remain.
        with scope or keras.StatelessScope():
            return operation(*call_args, **call_kwargs)

    return tf.function(call, autograph=False).get_concrete_function(
        *(
            tf.TensorSpec((x.shape[0] or 1, *x.shape[1:]), x.dtype)
            if x.shape
            else tf.TensorSpec((), x.dtype)
            for x in tensors
        )
    )


def call_key(operation, args, kwargs):
    """A key that is equal for calls of the same work."""
    try:
        config = operation.get_config()
        config.pop("name", None)
        config = json.dumps(config, sort_keys=True)
    except (AttributeError, NotImplementedError, TypeError):
        config = id(operation)
    variables = getattr(operation, "variables", [])
    described = keras.tree.map_structure(
        lambda x: (x.shape, x.dtype) if hasattr(x, "shape") else repr(x),
        (args, kwargs),
    )
    return (
        type(operation),
        config,
        repr(described),
        tuple(tuple(variable.shape) for variable in variables),
    )


def _is_tensor(x) -> bool:
    return isinstance(x, keras.KerasTensor)
