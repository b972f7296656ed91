"""Bytes that the tensors of a step ask for, and those that they get.

    TF_CPU_ALLOCATOR_USE_BFC=true python -m benchmarks.memory.requested

TensorFlow's allocator may give a tensor a free piece of up to twice its size,
and counts all of it. Its profile has both sizes of each tensor.
"""

import glob
import tempfile

import keras
import tensorflow as tf

import tfscale
from benchmarks.memory import worker

_CONFIG = {**worker.DEFAULTS, "data": 2, "zero_stage": 1}


class Profiles(keras.callbacks.Callback):
    """A profile of each step, and the bytes of the allocator before it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_begin(self, batch, logs=None):
        folder = tempfile.mkdtemp()
        info = tf.config.experimental.get_memory_info("CPU:0")
        self.found.append((folder, info["current"]))
        tf.profiler.experimental.start(folder)

    def on_train_batch_end(self, batch, logs=None):
        tf.profiler.experimental.stop()


def peaks(folder):
    """The most bytes that a step has more than at its begin: given, asked."""
    # As a tool of TensorFlow reads it.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    with open(path, "rb") as file:
        space = xplane_pb2.XSpace.FromString(file.read())
    changes = []
    for plane in space.planes:
        stats = {key: each.name for key, each in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                if not name.startswith("Memory"):
                    continue
                sign = -1 if name.startswith("MemoryDealloc") else 1
                sizes = {
                    stats[each.metadata_id]: sign * each.int64_value
                    for each in event.stats
                }
                start = line.timestamp_ns * 1000 + event.offset_ps
                sizes = sizes["allocation_bytes"], sizes["requested_bytes"]
                changes.append((start, *sizes))
    now, most = [0, 0], [0, 0]
    for _, *sizes in sorted(changes):
        now = [a + b for a, b in zip(now, sizes)]
        most = list(map(max, most, now))
    return most


def main():
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tfscale.use_virtual_devices(_CONFIG["data"])
    mesh = tfscale.device_mesh(data=_CONFIG["data"])
    strategy = tfscale.MeshStrategy(mesh, zero_stage=_CONFIG["zero_stage"])
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    with strategy.scope():
        model = worker.make_model(_CONFIG)
    batch = worker.make_batch(_CONFIG)
    model.fit(batch.repeat(3), verbose=0)
    profiles = Profiles()
    model.fit(batch.repeat(5), verbose=0, callbacks=[profiles])
    weights = 4 * model.count_params()
    for folder, rest in profiles.found[1:]:
        given, asked = peaks(folder)
        print(
            f"rest {(rest - before) / weights:.2f} P, step "
            f"{(rest - before + given) / weights:.2f} P, of which tensors "
            f"asked for {4 + asked / weights:.2f} P"
        )


if __name__ == "__main__":
    main()
