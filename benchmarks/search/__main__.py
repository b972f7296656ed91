"""Trials per minute of two groups against one, and how soon stopped ones end.

    pip install -e ".[ray]"
    python -m benchmarks.search

It runs the search of `examples.search`, whose flags it has, on a Ray of its
own, where a trial has one core. A trial counts with all that it does: its
process starts, imports TensorFlow, traces, trains and saves.
"""

import os
import statistics
import tempfile
import threading
import time

import ray
from absl import app
from absl import flags
from ray import tune

from examples import search

_GROUPS = flags.DEFINE_integer("groups", 2, "Trials at a time.", lower_bound=2)
_WAIT = 0.01  # seconds between two looks at a process

flags.adopt_module_key_flags(search)
flags.set_default(search.NUM_TRIALS, 4)
flags.set_default(search.WIDTHS, ["512"])
flags.set_default(search.mlp.NUM_ROWS, 8192)
flags.set_default(search.mlp.BATCH_SIZE, 256)
flags.set_default(search.mlp.NUM_EPOCHS, 60)


class Ends(tune.Callback):
    """Notes how long a process lives on after its trial was stopped."""

    def __init__(self):
        self.epochs = []
        self.seconds = []
        self.threads = []

    def on_trial_complete(self, iteration, trials, trial, **info):
        result = trial.last_result
        self.epochs.append(result["epoch"])
        if result["epoch"] < search.mlp.NUM_EPOCHS.value:
            thread = threading.Thread(
                target=self._watch, args=(result["pid"], time.monotonic())
            )
            self.threads.append(thread)
            thread.start()

    def _watch(self, pid, begin):
        while _is_alive(pid):
            time.sleep(_WAIT)
        self.seconds.append(time.monotonic() - begin)


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def run(groups, trials, epochs, min_epochs):
    """Trials per minute, and the seconds that stopped ones took to end."""
    flags.FLAGS.max_concurrent = groups
    flags.FLAGS.num_trials = trials
    flags.FLAGS.num_epochs = epochs
    flags.FLAGS.min_epochs = min_epochs
    ends = Ends()
    with tempfile.TemporaryDirectory() as storage:
        tuner = search.make_tuner(storage, 1, [ends])
        begin = time.monotonic()
        results = tuner.fit()
        minutes = (time.monotonic() - begin) / 60
    if results.num_errors:
        raise SystemExit(f"{results.num_errors} trials failed; see above.")
    for thread in ends.threads:
        thread.join()
    print(f"{groups} at a time: {60 * minutes:.1f} s, epochs {ends.epochs}")
    return trials / minutes, ends.seconds


def main(argv):
    del argv
    groups, trials = _GROUPS.value, search.NUM_TRIALS.value
    epochs = search.mlp.NUM_EPOCHS.value
    # Its own processes share the cores: as few as there can be.
    ray.init(num_cpus=groups, log_to_driver=False, include_dashboard=False)
    # None is stopped: each has the same work.
    one, _ = run(1, trials, epochs, epochs)
    several, _ = run(groups, trials, epochs, epochs)
    _, seconds = run(groups, 2 * trials, 4, 1)
    print(
        f"Trials per minute: {one:.2f}, with {groups} groups {several:.2f}: "
        f"{several / one:.2f} times as many"
    )
    print(
        f"{len(seconds)} stopped trials: their processes ended after "
        f"{statistics.median(seconds):.2f} s (median), at most "
        f"{max(seconds):.2f} s"
    )


if __name__ == "__main__":
    app.run(main)
