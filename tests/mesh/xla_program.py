"""Counts what XLA compiles, and the memory of 500 steps, in its own process.

    XLA_FLAGS=--xla_dump_to=FOLDER python -m tests.mesh.xla_program FOLDER

It prints both as JSON.
"""

import glob
import json
import resource
import sys

import keras
import numpy as np

import tfscale

_ROWS, _WIDTH, _STEPS = 64, 1024, 500


class Memory(keras.callbacks.Callback):
    """Notes the resident bytes of the process after some steps."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        """Reads them from Linux."""
        if batch + 1 in self.steps:
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[1])
            self.found.append(pages * resource.getpagesize())


def main():
    folder = sys.argv[1]
    tfscale.use_virtual_devices(2, "CPU")
    with tfscale.MeshStrategy(tfscale.device_mesh(data=2)).scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(_WIDTH, activation="relu"),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse", jit_compile=True)

    seen = set()

    def fit(rows, steps, *callbacks):
        """Clusters that XLA compiles meanwhile, by name."""
        x = np.ones((rows * steps, 8), "float32")
        # A cluster may run a few times before it is compiled.
        model.fit(x, x[:, :1], rows, callbacks=callbacks, verbose=0)
        files = glob.glob("module_*.*", root_dir=folder)
        modules = {tuple(file.split(".")[:2]) for file in files} - seen
        seen.update(modules)
        return sorted(cluster for _, cluster in modules)

    sizes = _ROWS, _ROWS // 2, _ROWS // 4
    compiled = [fit(rows, steps=4) for rows in sizes]
    again = [fit(rows, steps=4) for rows in sizes[1:]]
    memory = Memory([_STEPS // 5 * 2, _STEPS])
    again.append(fit(_ROWS, _STEPS, memory))
    found = {
        "compiled": compiled,
        "again": again,
        "resident": memory.found,
        "activation": 4 * _ROWS * _WIDTH,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
