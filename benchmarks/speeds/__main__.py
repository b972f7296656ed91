"""Two workers of unequal speed: equal parts against parts by speed.

    python -m benchmarks.speeds

Worker 0 has a core that a busy process shares, so it is half as fast as worker
1, which has a core for itself. Both train the same model, in turn with equal
parts of each batch and with `speeds=[1, 2]`.
"""

import os
import statistics
import subprocess
import sys
import time

from absl import app
from absl import flags
from absl import logging

PAIRS = flags.DEFINE_integer("pairs", 5, "How often each is measured.")
STEPS = flags.DEFINE_integer("steps", 4, "Steps of a measurement.")
ROWS = flags.DEFINE_integer("rows", 192, "Rows of a batch.")
WORKER = flags.DEFINE_bool("worker", False, "Whether this is a worker.")

_BUSY = "import os; os.sched_setaffinity(0, {%d})\nwhile True: pass"


def train(speeds):
    """Returns a function that times the steps of an epoch."""
    import keras
    import numpy as np

    import tfscale

    layers = keras.layers
    mesh = tfscale.device_mesh(data=2, speeds=speeds)
    with tfscale.MeshStrategy(mesh).scope():
        # Much to compute, and few gradients to send.
        model = keras.Sequential(
            [
                keras.Input((32, 32, 64)),
                *(layers.Conv2D(64, 3, padding="same") for _ in range(4)),
                layers.GlobalAveragePooling2D(),
                layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
    rows = STEPS.value * ROWS.value
    x, y = np.ones((rows, 32, 32, 64), "float32"), np.ones((rows, 1), "float32")

    def seconds():
        start = time.monotonic()
        model.fit(x, y, batch_size=ROWS.value, shuffle=False, verbose=0)
        return (time.monotonic() - start) / STEPS.value

    return seconds


def work(cores):
    """A worker: times both, and worker 0 prints."""
    import json

    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    # Before TensorFlow counts the cores.
    os.sched_setaffinity(0, {cores[index]})
    import tfscale

    logging.set_verbosity(logging.ERROR)
    tfscale.initialize()
    equal, by_speed = train(None), train([1, 2])
    equal(), by_speed()  # traces
    ratios = []
    for _ in range(PAIRS.value):
        a, b = equal(), by_speed()
        ratios.append(a / b)
        if index == 0:
            print(f"equal {a:.3f} s, by speed {b:.3f} s a step: {a / b:.2f}")
    if index == 0:
        print(
            f"median {statistics.median(ratios):.2f}, from {min(ratios):.2f} "
            f"to {max(ratios):.2f}"
        )


def main(_):
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise app.UsageError("It takes two cores: none would be faster.")
    if WORKER.value:
        work(cores)
        return
    arguments = [f"--{f.name}={f.value}" for f in (PAIRS, STEPS, ROWS)]
    with subprocess.Popen([sys.executable, "-c", _BUSY % cores[0]]) as busy:
        try:
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "tfscale.launch"),
                    *("--num_workers=2", "--devices_per_worker=1"),
                    *("-m", "benchmarks.speeds", "--worker", *arguments),
                ]
            )
        finally:
            busy.kill()
    sys.exit(done.returncode)


if __name__ == "__main__":
    app.run(main)
