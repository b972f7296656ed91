"""The example that searches, on a real Ray."""

import contextlib
import glob
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import pytest
from absl.testing import absltest

from tests.source_files import REPOSITORY
from tfscale.backup.files.lock import FolderLock

SECONDS = 400.0
SMALL = ("--num_rows=320", "--num_epochs=3", "--min_epochs=3")
KILL = """
import os, signal
import examples.search
from absl import app

epochs = 0
def main(argv):
    from ray import tune
    from ray.tune import callback
    class KillDriver(callback.Callback):
        def on_trial_result(self, **_):
            global epochs
            epochs += 1
            if epochs == 3:
                os.kill(os.getpid(), signal.SIGKILL)
    make_tuner = examples.search.make_tuner
    def with_kill(*arguments):
        tuner = make_tuner(*arguments)
        tuner._local_tuner._run_config.callbacks = [KillDriver()]
        return tuner
    examples.search.make_tuner = with_kill
    examples.search.main(argv)
app.run(main)
"""


def command(*arguments, program=("-m", "examples.search")):
    return [sys.executable, *program, *SMALL, *arguments]


def environment():
    return {
        **os.environ,
        "PYTHONPATH": REPOSITORY,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # other tests would go before
    }


def run(*arguments, program=("-m", "examples.search")):
    """Output of the program, which is to end well."""
    done = subprocess.run(
        command(*arguments, program=program),
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return done


def histories(storage):
    """Validation losses of each option, by epoch."""
    found = {}
    for path in glob.glob(f"{storage}/search/*/result.json"):
        with open(path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        if lines:
            option = tuple(sorted(lines[0]["config"].items()))
            found[option] = {line["epoch"]: line["val_loss"] for line in lines}
    return found


def most_at_a_time(storage):
    """Trials that ran at the same time."""
    begins, ends = [], []
    for path in glob.glob(f"{storage}/search/*/result.json"):
        with open(path, encoding="utf-8") as file:
            last = json.loads(file.readlines()[-1])
        # The time of a result is in whole seconds.
        begins.append(last["timestamp"] + 1 - last["time_total_s"])
        ends.append(last["timestamp"])
    return max(
        sum(begin <= at < end for begin, end in zip(begins, ends))
        for at in begins
    )


@unittest.skipUnless(importlib.util.find_spec("ray"), "needs Ray")
class SearchTest(absltest.TestCase):
    @pytest.mark.crossing
    def test_groups_have_the_losses_of_one_after_the_other(self):
        both, single = tempfile.mkdtemp(), tempfile.mkdtemp()
        done = run("--num_trials=2", f"--storage={both}")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("Best: ", done.stdout)
        done = run(
            "--num_trials=2", "--max_concurrent=1", f"--storage={single}"
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertLen(histories(both), 2)
        self.assertEqual(histories(both), histories(single))
        self.assertEqual(most_at_a_time(single), 1)

    @pytest.mark.crossing
    def test_a_trial_that_raises_ends_no_other(self):
        storage = tempfile.mkdtemp()
        done = run(
            *("--num_trials=3", "--widths=16,-1", "--seed=1"),
            f"--storage={storage}",
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        options = [
            json.loads(line)
            for line in done.stdout.splitlines()
            if line.startswith("{")
        ]
        self.assertLen(options, 3)
        self.assertEqual({o["width"] for o in options}, {16, -1})
        for option in options:
            self.assertEqual(option["error"] is None, option["width"] == 16)
            self.assertEqual(
                option["epochs"], 3 if option["width"] == 16 else 0
            )

    @pytest.mark.crossing
    def test_a_search_goes_on_after_a_kill_of_its_driver(self):
        storage, whole = tempfile.mkdtemp(), tempfile.mkdtemp()
        arguments = ("--num_trials=2", f"--storage={storage}")
        done = run(*arguments, program=("-c", KILL))
        self.assertEqual(done.returncode, -signal.SIGKILL, done.stderr)
        # A trial of the killed driver has its backups for so long.
        trial = min(glob.glob(f"{storage}/backups/*"))
        lock = self._when_free(trial)
        threading.Timer(45.0, lock.release).start()
        done = run(*arguments)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        done = run("--num_trials=2", f"--storage={whole}")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        expected = histories(whole)
        found = histories(storage)
        self.assertEqual(set(found), set(expected))
        for option, losses in found.items():
            self.assertEqual(
                losses, {epoch: expected[option][epoch] for epoch in losses}
            )
            self.assertIn(3, losses)

    def _when_free(self, folder):
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                return FolderLock(folder)
            time.sleep(1.0)
        self.fail(f"{folder} is in use")

    def test_a_group_is_not_larger_than_a_machine(self):
        done = run("--num_replicas=4096", f"--storage={tempfile.mkdtemp()}")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("4096", done.stdout + done.stderr)
        self.assertIn("--num_replicas", done.stdout + done.stderr)


if __name__ == "__main__":
    absltest.main()
