"""Trains one configuration in a process of its own, as the driver says.

A device is one core: one intra-op thread, and as many inter-op threads as
there are devices. These are options of a process, hence one per configuration.
"""

import functools
import itertools
import json
import statistics
import sys
import time

import keras

from benchmarks.step_clock import StepClock
from benchmarks.tensor_parallel import models


def train_with_tfscale(name, num_devices, **kwargs):
    """Plain Keras on one device, a `MeshStrategy` on several."""
    import tensorflow as tf

    import tfscale

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(num_devices)
    tfscale.use_virtual_devices(num_devices)
    batches = tf.data.Dataset.from_tensors(models.batch(name)).repeat()
    if num_devices == 1:
        model = models.compiled(name)
    else:
        mesh = tfscale.device_mesh(model=num_devices)
        layouts = models.layout_map(name, mesh)
        with tfscale.MeshStrategy(mesh, layouts, **kwargs).scope():
            model = models.compiled(name)
    return _by_fit(model, batches)


def train_with_jax(name, num_devices):
    """Plain Keras on one device, `keras.distribution.ModelParallel` on several.

    The threads of JAX are set by the environment that the driver gives.
    """
    if num_devices > 1:
        mesh = keras.distribution.DeviceMesh(
            (1, num_devices),
            ("batch", "model"),
            keras.distribution.list_devices("cpu"),
        )
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(
                layout_map=models.layout_map(name, mesh),
                batch_dim_name="batch",
            )
        )
    batches = itertools.repeat(models.batch(name))
    return _by_fit(models.compiled(name), (pair for pair in batches))


def train_with_dtensor(name, num_devices):
    """The MLP in a loop of its own over `tf.experimental.dtensor`."""
    from benchmarks.tensor_parallel import dtensor_mlp

    if name != "mlp":
        raise ValueError(f"Only 'mlp' is written for DTensor, not {name!r}.")
    return dtensor_mlp.make(num_devices)


def _by_fit(model, batches):
    def steps(number):
        clock = StepClock()
        history = model.fit(
            batches, steps_per_epoch=number, verbose=0, callbacks=[clock]
        )
        return clock.times, history.history["loss"][0]

    return steps


SYSTEMS = {
    "tfscale": train_with_tfscale,
    "sequence": functools.partial(train_with_tfscale, sequence_parallel=True),
    "dtensor": train_with_dtensor,
    "jax": train_with_jax,
}


def main():
    config = json.loads(sys.argv[1])
    keras.config.disable_interactive_logging()
    begin = time.perf_counter()
    run = SYSTEMS[config["system"]](config["model"], config["devices"])
    _, loss = run(1)
    answer = {"first_step": time.perf_counter() - begin, "loss": float(loss)}
    while True:
        print(json.dumps(answer), flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        begin = time.perf_counter(), time.process_time()
        times, _ = run(int(line))
        answer = {
            "step": statistics.median(times),
            # Includes what `fit` does around the steps, which is little.
            "cores": (time.process_time() - begin[1]) / sum(times),
        }


if __name__ == "__main__":
    main()
