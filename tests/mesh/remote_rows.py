"""What a coordinator and two servers do; remote_test.py runs it.

    python -m tests.mesh.remote_rows FILE [ROW ...]

It imports TensorFlow once, and becomes all three by forks before TensorFlow
has started. To the file it adds a line of JSON for each row (its name, what
failed or null, seconds) and one for what the servers exited with.
"""

import ctypes
import dataclasses
import functools
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest

import tfscale
from tests import forked_processes
from tests import same_numbers
from tfscale.cluster import Cluster
from tfscale.pipeline.running import loop

TEST = absltest.TestCase()
# Of each of the three processes, two devices.
(A0, A1), (B0, B1), (C0, C1) = (
    [f"/job:worker/replica:0/task:{task}/device:CPU:{i}" for i in range(2)]
    for task in range(3)
)


def build():
    """A lookup, a skip, and what the model axis can divide."""
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(8, 8)(tokens)
    h = keras.layers.Dense(16, activation="relu")(x)
    x = keras.layers.Add()([x, keras.layers.Dense(8)(h)])
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.Dense(4)(keras.layers.Flatten()(x))
    return keras.Model(tokens, keras.layers.Dense(3)(x))


def job(rows=32, optimizer=lambda: keras.optimizers.SGD(0.05, momentum=0.9)):
    random = np.random.RandomState(0)
    return same_numbers.Job(
        build,
        dict(
            x=random.randint(0, 8, (rows, 6)),
            y=random.randint(0, 3, rows),
            batch_size=16,
        ),
        optimizer,
        lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        lambda: dict(metrics=["accuracy"]),
    )


def adam():
    return keras.optimizers.Adam(0.01, global_clipnorm=0.5)


@functools.cache
def one_device():
    return same_numbers.on_one_device(job())


def devices_of(model):
    return {
        tensor.device
        for variable in model.trainable_variables
        for tensor in variable.value.values
    }


def a_signal_to_a_server():
    """It goes on, as the rows below show: who has it may want to save."""
    os.kill(PROCESSES[0], signal.SIGTERM)


def pipeline_2():
    """Stages on two servers, neither of them the coordinator's own."""
    expected = same_numbers.on_one_device(job(33, adam))
    found = same_numbers.on_mesh(job(33, adam), 2, 2, devices=[B0, C0])
    same_numbers.assert_same(TEST, expected, found)
    TEST.assertEqual(devices_of(found.model), {B0, C0})
    x, y = job(33).data["x"], job(33).data["y"]
    predicted = found.model.predict(x, batch_size=16, verbose=0)
    same_numbers.assert_close(
        predicted, expected.model.predict(x, batch_size=16, verbose=0)
    )
    same_numbers.assert_close(
        found.model.evaluate(x, y, batch_size=16, verbose=0),
        expected.model.evaluate(x, y, batch_size=16, verbose=0),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        with TEST.assertRaisesRegex(ValueError, f"by one process.*'{B0}'"):
            tfscale.export(found.model, path)
        TEST.assertFalse(os.path.exists(path))
        found.model.save(path)
        loaded = keras.models.load_model(path)
        same_numbers.assert_close(
            loaded.predict(x, batch_size=16, verbose=0), predicted
        )
        for variable in found.model.trainable_variables:
            variable.assign(tf.zeros_like(variable))
        found.model.load_weights(path)
        for one, two in zip(found.model.weights, loaded.weights):
            np.testing.assert_array_equal(one, two)


def pipeline_2_in_a_loop():
    """9 microbatches of 16 rows, and of 1: what repeats runs in a loop."""
    with mock.patch.object(loop, "run", side_effect=loop.run) as run:
        found = same_numbers.on_mesh(job(33, adam), 2, 9, devices=[B0, C0])
    TEST.assertGreater(run.call_count, 0)
    expected = same_numbers.on_one_device(job(33, adam))
    same_numbers.assert_same(TEST, expected, found)


def data_2_pipeline_2():
    """Rows of stages within a server, and across two."""
    for devices in ([A0, A1, B0, B1], [A0, B0, A1, B1]):
        found = same_numbers.on_mesh(job(), 2, 4, 2, devices=devices)
        same_numbers.assert_same(TEST, one_device(), found)
        TEST.assertEqual(devices_of(found.model), set(devices))


def pipeline_2_model_2():
    found = same_numbers.on_mesh(
        job(), 2, 2, num_ranks=2, devices=[A0, A1, B0, B1]
    )
    same_numbers.assert_same(TEST, one_device(), found)
    kernel = found.model.trainable_variables[0].value
    TEST.assertEqual([tuple(v.shape) for v in kernel.values], [(4, 8)] * 2)


def data_2_model_2():
    """Model ranks across two machines."""
    found = same_numbers.on_ranks(job(), 2, 2, devices=[A0, B0, A1, B1])
    same_numbers.assert_same(TEST, one_device(), found)


def python_functions():
    """They run here, in a stage and in a metric of a server.

    A stage on a server had said that it could not find the function.
    """

    def doubled(x):
        y = tf.numpy_function(lambda a: 2 * a, [x], x.dtype)
        return tf.ensure_shape(y, x.shape)

    def distance(y, predicted):
        # Predictions are larger than what comes of them: they do not travel.
        devices.add((predicted + 1).device)
        found = tf.numpy_function(
            lambda a, b: np.abs(a - b).mean(-1), [y, predicted], tf.float32
        )
        return tf.ensure_shape(found, [None])

    def build():
        x = inputs = keras.Input((6,))
        x = keras.layers.Lambda(doubled)(x)
        return keras.Model(inputs, keras.layers.Dense(2, name="last")(x))

    devices = set()
    random = np.random.RandomState(0)
    own_job = dataclasses.replace(
        job(),
        build=build,
        data=dict(
            x=random.rand(16, 6).astype("float32"),
            y=random.rand(16, 2).astype("float32"),
        ),
        loss=lambda: "mse",
        compile=lambda: dict(metrics=[distance]),
    )
    expected = same_numbers.on_one_device(own_job)
    devices.clear()
    found = same_numbers.on_mesh(own_job, 1, 2, devices=[B0])
    same_numbers.assert_same(TEST, expected, found)
    TEST.assertIn(B0, devices)


def zero_data_and_backup():
    """A training that is interrupted goes on, with slots on two machines."""

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            begun.append(batch)
            if begun == [0, 1]:
                raise InterruptedError

    def with_data(**fit):
        data = tfscale.data.pipeline(
            tfscale.data.arrays(job(48).data["x"], job(48).data["y"]),
            batch_size=16,
            seed=3,
        )
        return dataclasses.replace(job(), data=dict(x=data), fit=fit)

    def train():
        # It was made in the scope of the last strategy, if it is there.
        tf.random.set_global_generator(tf.random.Generator.from_seed(1))
        backup = tfscale.callbacks.BackupAndRestore(folder, save_freq=1)
        interrupted = with_data(callbacks=[backup, Interrupt()])
        return same_numbers.on_zero(interrupted, 2, devices=[A0, B0])

    begun = []
    with tempfile.TemporaryDirectory() as folder:
        with TEST.assertRaises(InterruptedError):
            train()
        found = train()
    TEST.assertLess(len(begun), 5)  # of two times three steps
    expected = same_numbers.on_one_device(with_data())
    # What it began with is what was restored.
    found = dataclasses.replace(found, initial=expected.initial)
    same_numbers.assert_same(TEST, expected, found)


def slots_on_each_host():
    """The host of a device is the first CPU of its own machine."""
    found = same_numbers.on_zero(job(), 2, devices=[A1, B1], offload="slots")
    same_numbers.assert_same(TEST, one_device(), found)
    slots = {
        component.device
        for slot in found.model.optimizer.variables
        for component in slot.value.values
    }
    TEST.assertEqual(slots, {A0, B0})


def sequence_parallel():
    """Norms and residuals sharded over two machines."""
    mesh = tfscale.device_mesh(model=2, devices=[A0, B0])
    layout_map = same_numbers.layout_map_for(job(), mesh)
    same_numbers.reset()
    strategy = tfscale.MeshStrategy(mesh, layout_map, sequence_parallel=True)
    found = same_numbers.plain(job(), strategy)
    same_numbers.assert_same(TEST, one_device(), found)


def default_devices():
    """Equally many of each process, so that none is left out unseen."""
    mesh = tfscale.device_mesh(data=2, pipeline=3)
    TEST.assertEqual(list(mesh.devices.flat), [A0, A1, B0, B1, C0, C1])
    mesh = tfscale.device_mesh(pipeline=3)
    TEST.assertEqual(list(mesh.devices.flat), [A0, B0, C0])
    with TEST.assertRaisesRegex(ValueError, "the same number in each process"):
        tfscale.device_mesh(pipeline=2)


def lost_server():
    """The last one: a server is killed while it is needed."""
    times = []

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                times.append(time.monotonic())
                os.kill(PROCESSES[1], signal.SIGKILL)

    endless = tf.data.Dataset.from_tensors(
        (job().data["x"], job().data["y"])
    ).repeat()
    endless_job = dataclasses.replace(
        job(),
        data=dict(x=endless),
        fit=dict(steps_per_epoch=1_000_000, callbacks=[Kill()]),
    )
    # Another thread says it too, and would end with this process.
    is_said, error = threading.Event(), logging.error

    def say(*args):
        error(*args)
        is_said.set()

    with mock.patch.object(logging, "error", say):
        with TEST.assertRaisesRegex(
            tf.errors.UnavailableError, "task:2 is gone, with its stages"
        ):
            same_numbers.on_mesh(endless_job, 2, 2, devices=[A0, C0])
        TEST.assertLess(time.monotonic() - times[0], 15.0)
        TEST.assertTrue(is_said.wait(timeout=15.0))


ROWS = (
    a_signal_to_a_server,
    pipeline_2,
    pipeline_2_in_a_loop,
    data_2_pipeline_2,
    pipeline_2_model_2,
    data_2_model_2,
    python_functions,
    zero_data_and_backup,
    slots_on_each_host,
    sequence_parallel,
    default_devices,
    lost_server,
)
# What other rows show too, and rows of one process: for `--exhaustive`.
CROSSED = (
    pipeline_2_in_a_loop,
    data_2_pipeline_2,
    pipeline_2_model_2,
    slots_on_each_host,
    sequence_parallel,
    lost_server,
)
ALWAYS = [row for row in ROWS if row not in CROSSED[:-1]]
# Process ids: the servers, the coordinator.
PROCESSES = []
_PR_SET_PDEATHSIG = 1


def become_one_of_three():
    """Forks; returns the number of the process, or None in the first one."""
    addresses = tuple(forked_processes.free_addresses(3))
    print("servers", *addresses[1:], flush=True)
    os.environ["TFSCALE_VIRTUAL_DEVICES"] = "2"
    parent = os.getpid()
    for index in (1, 2, 0):  # The coordinator knows the others.
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            cluster = Cluster({"worker": addresses}, "worker", index)
            os.environ["TF_CONFIG"] = cluster.to_tf_config()
            return index
        PROCESSES.append(pid)
    return None


def write(name, failed, seconds=0.0):
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps([name, failed, round(seconds, 1)]) + "\n")


def main():
    if become_one_of_three() is None:
        statuses = [os.waitpid(pid, 0)[1] for pid in PROCESSES]
        write("exit codes", list(map(os.waitstatus_to_exitcode, statuses)))
        return
    tfscale.initialize(coordinator=True)
    for row in ROWS:
        if sys.argv[2:] and row.__name__ not in sys.argv[2:]:
            continue
        start = time.monotonic()
        try:
            row()
            failed = None
        except Exception:
            failed = traceback.format_exc()
        write(row.__name__, failed, time.monotonic() - start)


if __name__ == "__main__":
    main()
