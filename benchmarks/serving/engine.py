"""Requests per second of a replica of `examples/serve.py`, without HTTP.

python -m benchmarks.serving.engine

64 requests of one row at a time are put into batches of 32, as for 64 clients.
"""

import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import app
from absl import flags

from benchmarks.processes import Turns
from benchmarks.serving import models
from examples.serve import SavedModel

_ROUNDS = flags.DEFINE_integer("rounds", 7, "How often each takes its turn.")

REQUESTS = 1024
# title: the mesh, processes, rows of a batch, batches in flight
CONTESTANTS = {
    "one device": ("data=1", 1, 32, 1),
    "one device, no batches": ("data=1", 1, 1, 1),
    "2 replicas": ("data=1", 2, 32, 1),
    "model=2": ("model=2", 1, 32, 1),
    "model=2, 2 in flight": ("model=2", 1, 32, 2),
    "pipeline=2": ("pipeline=2", 1, 32, 2),
}


def serve(config):
    """Answers each line by the requests that it serves in a second."""
    models.one_core_each(config["devices"])
    model = SavedModel(config["path"], config["devices"], use_gpus=False)
    rows = np.random.RandomState(0).normal(size=(64, models.INPUTS))
    requests = [model.inputs_of({"instances": [row]}) for row in rows]
    size = config["batch"]
    batches = [requests[i : i + size] for i in range(0, 64, size)]
    number = config["requests"] // size
    with concurrent.futures.ThreadPoolExecutor(config["in_flight"]) as pool:
        todo = [batches[i % len(batches)] for i in range(number)]
        list(pool.map(model.predict, todo[:4]))
        for _ in sys.stdin:
            begin = time.perf_counter()
            list(pool.map(model.predict, todo))
            seconds = time.perf_counter() - begin
            print(json.dumps(number * size / seconds), flush=True)


def main(argv):
    """Prints a line for each contestant, with ratios within a round."""
    del argv
    with tempfile.TemporaryDirectory() as folder:
        for mesh in sorted({mesh for mesh, *_ in CONTESTANTS.values()}):
            subprocess.run(
                [
                    *(sys.executable, "-m", "benchmarks.serving.models"),
                    *(os.path.join(folder, mesh), mesh),
                ],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        served = {
            title: [
                Turns(
                    "benchmarks.serving.engine",
                    {
                        "path": os.path.join(folder, mesh),
                        "devices": int(mesh[-1]),
                        "batch": batch,
                        "in_flight": in_flight,
                        "requests": REQUESTS // (8 if batch == 1 else 1),
                    },
                )
                for _ in range(processes)
            ]
            for title, (mesh, processes, batch, in_flight) in (
                CONTESTANTS.items()
            )
        }
        speeds = {title: [] for title in served}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for _ in range(_ROUNDS.value + 1):
                for title, processes in served.items():
                    answers = pool.map(lambda process: process.ask(), processes)
                    speeds[title].append(sum(answers))
        for processes in served.values():
            for process in processes:
                process.end()
    for title, found in speeds.items():
        ratios = [x / one for x, one in zip(found, speeds["one device"])][1:]
        print(
            f"{title}: {statistics.median(found[1:]):.0f}/s, "
            f"{statistics.median(ratios):.2f} of one device "
            f"({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        serve(json.loads(sys.argv[1]))
    else:
        app.run(main)
