"""One step of a model that somebody else wrote, by Keras on one device."""

import keras
import numpy as np
import tensorflow as tf

RATE = 1.0  # of SGD, so that an update is a gradient


def on_one_device(model, x):
    """Targets, the loss, and the gradients of all weights, by plain Keras.

    Called without a state: with numbers in the place of variables.
    """
    random = np.random.RandomState(1)
    weights = [tf.constant(np.array(v)) for v in model.trainable_variables]
    others = [tf.constant(np.array(v)) for v in model.non_trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        outputs, _, losses = model.stateless_call(
            weights, others, x, training=True, return_losses=True
        )
        y = keras.tree.map_structure(
            lambda output: random.normal(size=output.shape).astype(
                output.dtype.as_numpy_dtype
            ),
            outputs,
        )
        loss = sum(losses) + sum(
            keras.ops.mean(keras.ops.square(output - wanted))
            for output, wanted in zip(
                keras.tree.flatten(outputs), keras.tree.flatten(y), strict=True
            )
            if output.dtype.is_floating  # or it is a mask
        )
    return (
        y,
        loss,
        [
            np.zeros(v.shape) if g is None else tf.convert_to_tensor(g).numpy()
            for v, g in zip(weights, tape.gradient(loss, weights))
        ],
    )


def assert_same(variables, old, gradients):
    """Raises unless variables were updated by gradients, to rounding."""
    largest = max(np.abs(gradient).max() for gradient in gradients)
    assert largest > 1e-3, largest
    for variable, value, gradient in zip(
        variables, old, gradients, strict=True
    ):
        np.testing.assert_allclose(
            (value - np.array(variable)) / RATE,
            gradient,
            rtol=0,
            atol=1e-5 * max(largest, np.abs(value).max()),
            err_msg=variable.path,
        )
