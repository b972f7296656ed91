"""Speed of two devices over one, under each strategy; a device is one core.

    python -m benchmarks.strategies

Each strategy lives in processes of its own, which take turns, so that a machine
that slows down slows all of them down. The global batch is the same for all.
"""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys

from absl import app
from absl import flags

_BATCH = flags.DEFINE_integer("batch", 32, "Sequences in a global batch.")
_BLOCKS = flags.DEFINE_integer("blocks", 8, "Blocks of the GPT.")
_LENGTH = flags.DEFINE_integer("length", 64, "Tokens in a sequence.")
_WIDTH = flags.DEFINE_integer("width", 256, "Features of a token.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of each strategy.")
_STEPS = flags.DEFINE_integer("steps", 6, "Steps of a turn.")

# What trains, in how many processes.
STRATEGIES = {
    "one": 1,
    "mirrored": 1,
    "mesh": 1,
    "workers": 2,
}
TITLES = {
    "one": "plain Keras, one device",
    "mirrored": "`tf.distribute.MirroredStrategy`, 2 replicas in one process",
    "mesh": "`MeshStrategy(data=2)`, 2 replicas in one process",
    "workers": "`MeshStrategy(data=2)`, 2 workers of one replica",
}


class _Strategy:
    """The processes of a strategy, which wait for their turn."""

    def __init__(self, name):
        count = STRATEGIES[name]
        config = {
            "strategy": name,
            "blocks": _BLOCKS.value,
            "width": _WIDTH.value,
            "length": _LENGTH.value,
            "batch": _BATCH.value,
            "stages": 0,
            "steps": _STEPS.value,
        }
        command = [
            *(sys.executable, "-m", "benchmarks.strategies.worker"),
            json.dumps(config),
        ]
        self._processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for environment in _environments(count)
        ]
        self.turns = []

    def turn(self):
        """Has them train, and adds the seconds of a step."""
        for process in self._processes:
            process.stdin.write("\n")
            process.stdin.flush()
        found = [float(p.stdout.readline()) for p in self._processes]
        self.turns.append(max(found))

    def end(self):
        """Ends the processes."""
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait()


def _environments(count):
    """What each of so many workers finds in its environment."""
    if count == 1:
        return [{}]
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("localhost", 0))
        names = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    return [
        {
            "TF_CONFIG": json.dumps(
                {
                    "cluster": {"worker": names},
                    "task": {"type": "worker", "index": index},
                }
            )
        }
        for index in range(count)
    ]


def main(argv):
    del argv
    strategies = {name: _Strategy(name) for name in STRATEGIES}
    try:
        for _ in range(_ROUNDS.value):
            for strategy in strategies.values():
                strategy.turn()
    finally:
        for strategy in strategies.values():
            strategy.end()
    print("| strategy | a step | speed | speed of each turn |")
    print("|---|---|---|---|")
    for name, strategy in strategies.items():
        ratios = [
            one / own
            for one, own in zip(strategies["one"].turns, strategy.turns)
        ]
        seconds = statistics.median(strategy.turns)
        print(
            f"| {TITLES[name]} | {seconds * 1e3:.0f} ms "
            f"| {statistics.median(ratios):.2f} "
            f"| {', '.join(f'{ratio:.2f}' for ratio in ratios)} |"
        )


if __name__ == "__main__":
    app.run(main)
