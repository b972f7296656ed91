"""The MLP over `tf.experimental.dtensor`, with nothing of Keras around it."""

import time

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from benchmarks.tensor_parallel import models

_RATE, _MOMENTUM = 0.01, 0.9


def make(num_devices):
    """A function that takes steps, and returns their seconds and a loss."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(num_devices)
    cpu = tf.config.list_physical_devices("CPU")[0]
    one = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [one] * num_devices)
    # The same weights as those of the others.
    keras.utils.set_random_seed(0)
    weights = models.build_mlp().get_weights()
    mesh = dtensor.create_mesh([("model", num_devices)], device_type="CPU")
    names = ["model", dtensor.UNSHARDED]
    # Columns, their bias, rows, and a bias after the sum, for every pair.
    layouts = [names[::-1], names[:1], names, names[1:]]
    layouts = [dtensor.Layout(axes, mesh) for axes in layouts]
    replicated = dtensor.Layout.replicated(mesh, 2)

    def variable(value, layout):
        whole = dtensor.Layout.replicated(mesh, value.ndim)
        value = dtensor.copy_to_mesh(value, whole)
        return dtensor.DVariable(dtensor.relayout(value, layout))

    placed = list(zip(weights, layouts * (len(weights) // len(layouts))))
    variables = [variable(value, layout) for value, layout in placed]
    slots = [variable(value * 0, layout) for value, layout in placed]
    x, y = (dtensor.copy_to_mesh(a, replicated) for a in models.batch("mlp"))

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            output = x
            for index in range(0, len(variables), 4):
                up, up_bias, down, down_bias = variables[index : index + 4]
                hidden = tf.nn.relu(tf.matmul(output, up) + up_bias)
                output = tf.matmul(hidden, down) + down_bias
            loss = tf.reduce_mean(tf.math.squared_difference(output, y))
        for variable, slot, gradient in zip(
            variables, slots, tape.gradient(loss, variables)
        ):
            slot.assign(_MOMENTUM * slot - _RATE * gradient)
            variable.assign_add(slot)
        return loss

    def steps(number):
        times = []
        for _ in range(number):
            begin = time.perf_counter()
            # Not done before every device has its part.
            losses = [part.numpy() for part in dtensor.unpack(step(x, y))]
            times.append(time.perf_counter() - begin)
        return times, losses[0]

    return steps
