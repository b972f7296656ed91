"""Measures one thing about backups, in a process of its own.

    python -m benchmarks.backup.worker '{"what": "memory"}'

The state is that of `layers` square matrices under Adam: three times their
size.
"""

import contextlib
import json
import pathlib
import statistics
import sys
import tempfile
import time
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tfscale.backup.files.folder import BackupFolder
from tfscale.backup.state import variables


def model_of(width, layers):
    """The model, built and compiled, slots and all."""
    inputs = [keras.Input((width,))]
    model = keras.Sequential(
        inputs + [keras.layers.Dense(width) for _ in range(layers)]
    )
    model.compile(keras.optimizers.Adam(1e-6), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


class Ends(keras.callbacks.Callback):
    """When each step ended; before some, saves as TensorFlow does."""

    def __init__(self, checkpoint=None, every=0):
        super().__init__()
        self.times = []
        self.stalls = []
        self._checkpoint = checkpoint
        self._every = every

    def on_train_batch_begin(self, batch, logs=None):
        """Saves, if it is due."""
        if self._every and batch and batch % self._every == 0:
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                self._checkpoint.write(f"{folder}/checkpoint")
                self.stalls.append(time.perf_counter() - start)

    def on_train_batch_end(self, batch, logs=None):
        """Notes the time, once the step is over."""
        float(logs["loss"])
        self.times.append(time.perf_counter())


class _Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 5


def fit(model, rows, steps, callbacks):
    """Trains on the same batch again and again."""
    x = np.ones((rows, model.input_shape[1]), "float32")
    batches = tf.data.Dataset.from_tensors((x, x)).repeat(steps)
    model.fit(batches, verbose=0, callbacks=callbacks)


def overhead(width, layers, rows, seconds, rounds):
    """Seconds of steps without a callback, and with backups at "auto"."""
    model = model_of(width, layers)
    found = {"without": [], "with": [], "saves": [], "lost": []}
    found["bytes"] = bytes_of(model)
    ends = Ends()
    fit(model, rows, 50, [ends])
    period = statistics.median(np.diff(ends.times))
    steps = found["steps"] = max(int(seconds / period), 20)
    for _ in range(rounds):
        for name in ("without", "with"):
            with tempfile.TemporaryDirectory() as folder:
                ends, callbacks = Ends(), []
                if name == "with":
                    backup = tfscale.callbacks.BackupAndRestore(
                        folder, save_freq="auto", delete_checkpoint=False
                    )
                    callbacks.append(backup)
                with counted_saves() as saves:
                    fit(model, rows, steps, [ends, *callbacks])
            found[name].append(ends.times[-1] - ends.times[0])
        found["saves"].append(len(saves))
        found["lost"].append(lost_at_a_kill([0, *saves, steps]))
    return found


def lost_at_a_kill(saves):
    """Steps that are made again, on the average over all times of a kill."""
    return float(sum(np.diff(saves) ** 2) / 2 / (saves[-1] - saves[0]))


@contextlib.contextmanager
def counted_saves():
    """Gives a list that has one item for each backup that is begun."""
    saves = []
    commit = BackupFolder.commit

    def counted(*args):
        saves.append(args[1])
        return commit(*args)

    with mock.patch.object(BackupFolder, "commit", counted):
        yield saves


def bytes_of(model):
    """Bytes of all variables of a model and its optimizer."""
    variables_of = [*model.variables, *model.optimizer.variables]
    return sum(v.numpy().nbytes for v in variables_of)


def stall(width, layers, rows, steps, every):
    """Seconds by which a step with a save is longer than one without."""
    model = model_of(width, layers)
    fit(model, rows, 3, [])
    ends = Ends()
    with tempfile.TemporaryDirectory() as folder:
        backup = tfscale.callbacks.BackupAndRestore(folder, save_freq=every)
        fit(model, rows, steps, [ends, backup])
    periods = np.diff(ends.times)  # of the steps 1, 2, ...
    saved = periods[every - 1 :: every]
    usual = statistics.median(np.delete(periods, np.s_[every - 1 :: every]))
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    synchronous = Ends(checkpoint, every)
    fit(model, rows, steps, [synchronous])
    return {
        "step": usual,
        "held": [float(seconds - usual) for seconds in saved],
        "synchronous": synchronous.stalls,
        "bytes": bytes_of(model),
    }


def memory(width, layers):
    """Bytes that a save and a load of a state on two ranks need above it."""
    tfscale.use_virtual_devices(2)
    mesh = tfscale.device_mesh(model=2)
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*kernel"] = (None, "model")
    with tfscale.MeshStrategy(mesh, layout_map).scope():
        model = model_of(width, layers)
    entries = variables.variables_of(model)
    with tempfile.TemporaryDirectory() as path:
        folder = BackupFolder(path, keep=1)

        def save(step):
            folder.commit(step, variables.hold(entries), {})

        def load():
            variables.restore(entries, folder.newest())

        small = [e for e in entries if len(e.sharding.shape) < 2]
        folder.commit(0, variables.hold(small), {})  # all is loaded now
        return {
            "save": peak_above(lambda: save(1)),
            "load": peak_above(load),
            "largest_part": width * width * 4 // 2,
            "state": sum(
                component.numpy().nbytes
                for entry in entries
                if entry.sharding.is_sharded
                for component in entry.components
            ),
        }


def peak_above(function):
    """Bytes of memory that a function needs for a while."""
    # Linux: the peak begins anew.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _status(name):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise ValueError(name)


def position(records):
    """Bytes that a backup has of the place in shuffled records."""
    rows = np.zeros((records, 1), "float32")
    pipeline = tfscale.data.pipeline(
        tfscale.data.arrays(rows, rows), batch_size=8, seed=12345678
    )
    pipeline.position.assign(epoch=1_000_000)
    model = model_of(1, 1)
    with tempfile.TemporaryDirectory() as path:
        backup = tfscale.callbacks.BackupAndRestore(
            path, save_freq=2, delete_checkpoint=False
        )
        model.fit(pipeline, verbose=0, callbacks=[backup, _Stop()])
        state = BackupFolder(path, keep=1).newest().state["data_position"]
    return {"bytes": len(json.dumps(state))}


def main():
    config = json.loads(sys.argv[1])
    print(json.dumps(globals()[config.pop("what")](**config)), flush=True)


if __name__ == "__main__":
    main()
