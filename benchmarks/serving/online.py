"""Requests per second of `examples/serve.py`: clients that each send one row.

python -m benchmarks.serving.online
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
from absl import app
from absl import flags

from benchmarks.serving.models import INPUTS

_CLIENTS = flags.DEFINE_integer("clients", 64, "Clients at a time.")
_SECONDS = flags.DEFINE_float("seconds", 5, "How long to count.")

# title: the mesh that is exported, and flags of the example
CONTESTANTS = {
    "one device, no batches": ([], ["--max_batch_size=1"]),
    "one device": ([], []),
    "2 replicas": ([], ["--min_replicas=2", "--max_replicas=2"]),
    "model=2": (["model=2"], ["--devices_per_replica=2"]),
    "pipeline=2": (
        ["pipeline=2"],
        ["--devices_per_replica=2", "--batches_in_flight=2"],
    ),
}


def ask(connection, body):
    """Sends a request and waits for its answer."""
    connection.request("POST", "/v1/models/model:predict", body)
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise RuntimeError(content)


def count(port):
    """How many requests of all clients are answered in a second."""
    body = json.dumps({"instances": [np.random.rand(INPUTS).tolist()]})
    counts, begin = [], time.perf_counter()

    def run():
        number = 0
        connection = http.client.HTTPConnection("127.0.0.1", port)
        while time.perf_counter() - begin < _SECONDS.value:
            ask(connection, body)
            number += 1
        counts.append(number)

    clients = [threading.Thread(target=run) for _ in range(_CLIENTS.value)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    if len(counts) < len(clients):
        raise RuntimeError("Clients have died.")
    return sum(counts) / (time.perf_counter() - begin)


def measure(axes, options):
    """Requests per second of one contestant, from export to its end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "1")
        command = [sys.executable, "-m", "benchmarks.serving.models", path]
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        subprocess.run([*command, *(axes or ["data=1"])], check=True, **quiet)
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "examples.serve"),
                *(f"--model_path={path}", f"--port={port}", *options),
            ],
            # Else Ray's proxy in Python takes most of two cores.
            env={**os.environ, "RAY_SERVE_ENABLE_HA_PROXY": "1"},
            **quiet,
        )
        try:
            while server.poll() is None:
                with contextlib.suppress(OSError, RuntimeError):
                    count_once(port)
                    break
                time.sleep(0.5)
            count(port)
            return count(port)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()


def count_once(port):
    """One request, which is an error until the server is there."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    ask(connection, json.dumps({"instances": [[0.0] * INPUTS]}))


def main(argv):
    """Prints a line for each contestant."""
    del argv
    found = {}
    for title, (axes, options) in CONTESTANTS.items():
        found[title] = measure(axes, options)
        ratio = found[title] / found.get("one device", found[title])
        print(f"{title}: {found[title]:.0f}/s, {ratio:.2f}", flush=True)


if __name__ == "__main__":
    app.run(main)
