"""A worker that is killed, or exits: who says what of it, and how soon."""

import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from unittest import mock

import keras
import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_cluster
from tests import forked_python
from tests.source_files import REPOSITORY

DIFFERING = "tests.cluster.differing_worker"
PROGRAM = "tests.cluster.lost_worker"
EXITING = "tests.cluster.exiting_worker"
STANDING = "tests.cluster.standing_worker"
# What TensorFlow said of it, in some 60 lines.
CASCADE = (
    "Collective ops is aborted|Graph execution error|/tensorflow/python/|"
    "During handling of|The above exception"
)
# Its log, in C++, has an entry or two of a sum that was under way, which
# nobody but TensorFlow can take out. An error that another worker passed on
# has lines of its own in it.
_LOG_OF_CPP = (
    r"(?m)^.{0,20}\b[EW]\d{4} .*\n"
    "((Additional GRPC error information|:UNKNOWN:|The error could be from)"
    r".*\n)*"
)


def without_log_of_cpp(text):
    return re.sub(_LOG_OF_CPP, "", text)


def killed_at(text):
    """When the worker was killed, by its own clock."""
    return float(re.search(r"the last words, at ([\d.]+)", text).group(1))


def logs_without_launcher(program, num_workers):
    """The exit codes of all workers, and what each of them printed."""
    with tempfile.TemporaryDirectory() as folder:
        codes = forked_cluster.run(program, {"worker": num_workers}, folder)
        logs = {}
        for name in codes:
            with open(os.path.join(folder, f"{name}.log")) as file:
                logs[name] = file.read()
    return codes, logs


class LostWorkerTest(parameterized.TestCase):
    def test_the_first_one_names_another_that_never_joins(self):
        # It waited for ever, as only the others had a limit.
        codes, logs = logs_without_launcher(STANDING, 2)
        self.assertEqual(codes, {"worker0": 1, "worker1": -signal.SIGKILL})
        self.assertRegex(
            logs["worker0"].splitlines()[-1],
            r"^ConnectionError: .*worker 1 at \S+ does not answer any more",
        )

    def test_the_launcher_names_it_and_ends_the_others(self):
        folder = self.create_tempdir().full_path
        process = subprocess.Popen(
            [
                *(forked_python.executable(), "-m", "tfscale.launch"),
                "--num_workers=2",
                *("-m", PROGRAM, folder),
            ],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "-1",
                "TF_CPP_MIN_LOG_LEVEL": "3",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        hangs = threading.Timer(120.0, process.kill)
        hangs.start()
        self.addCleanup(hangs.cancel)
        output, reported_at = "", None
        with process.stdout:
            for line in process.stdout:
                output += line
                if "as the first" in line:
                    reported_at = time.time()
        self.assertEqual(process.wait(60.0), 128 + signal.SIGKILL, output)
        ended_at = time.time()
        _, said, report = output.partition("[launch] worker 1 was killed by ")
        self.assertTrue(said, output)
        self.assertRegex(report, r"SIGKILL, as the first. Its last lines:\n")
        self.assertIn("    the last words, at", report)
        self.assertIn("[launch] ending the others: worker 0", report)
        self.assertNotRegex(without_log_of_cpp(output), CASCADE)
        # The thread of its backup waited for the lost one for ever.
        self.assertNotIn("is there after", output)
        self.assertLess(reported_at - killed_at(output), 15.0)
        # One that waited for it in a step ended with TensorFlow's heartbeats.
        self.assertLess(ended_at - killed_at(output), 5.0)

    def test_without_a_launcher_the_others_name_it(self):
        codes, logs = logs_without_launcher(PROGRAM, 3)
        ended_at = time.time()
        self.assertEqual(codes, {"worker0": 1, "worker1": 1, "worker2": -9})
        self.assertLess(ended_at - killed_at(logs["worker2"]), 15.0)
        for name in ("worker0", "worker1"):
            with self.subTest(name):
                last = logs[name].splitlines()[-1]
                self.assertRegex(
                    last, r"Received: worker 2 at localhost:\d+ is gone"
                )
                self.assertNotRegex(without_log_of_cpp(logs[name]), CASCADE)

    @pytest.mark.crossing
    def test_one_that_exits_does_not_wait_for_who_waits_for_it(self):
        # `sys.exit(3)` took half a minute, in which the others hung.
        codes, logs = logs_without_launcher(EXITING, 2)
        self.assertEqual(codes, {"worker0": 1, "worker1": 3}, str(logs))
        last = logs["worker0"].splitlines()[-1]
        self.assertRegex(last, r"worker 1 at localhost:\d+ has ended while ")
        self.assertNotRegex(without_log_of_cpp(logs["worker0"]), CASCADE)
        ended_at = float(re.search("ended at (.*)", logs["worker1"]).group(1))
        self.assertLess(ended_at - killed_at(logs["worker1"]), 10.0)
        # TensorFlow took the signal away, and did nothing with it.
        for log in logs.values():
            self.assertIn("\nSIGTERM\n", log)
        # It was not let in with another version, which both have said.
        for log in logs.values():
            self.assertRegex(
                log,
                "must have the same version of Keras. Received: [^,]*"
                f"({keras.__version__}|3.9.9) at localhost[^,]*, "
                f"({keras.__version__}|3.9.9) at localhost",
            )

    @parameterized.parameters(
        ("evaluates", 0, 2, "Received: call of `evaluate` in worker 0, a step"),
        ("trains", 0, 2, "tensors of different steps"),
        ("makes variables", 1, 2, "same things.*Received: variable.* a step"),
    )
    @pytest.mark.crossing(every=3)
    def test_what_one_does_by_itself_is_named(self, what, who, count, expected):
        self.check_is_named(what, who, count, expected)

    @pytest.mark.crossing
    def test_what_the_last_of_three_does_by_itself_is_named(self):
        expected = "Received: call of `predict` in worker 2, a step"
        self.check_is_named("predicts", 2, 3, expected)

    def check_is_named(self, what, who, count, expected):
        # In a callback of one worker it waited for ever, as did the others.
        with mock.patch.dict(os.environ, WHAT=what, WHO=str(who)):
            codes, logs = logs_without_launcher(DIFFERING, count)
        ended_at = time.time()
        self.assertEqual(set(codes.values()), {1}, str(logs))
        self.assertLess(ended_at - killed_at(logs[f"worker{who}"]), 30.0)
        last = {name: log.splitlines()[-1] for name, log in logs.items()}
        # Who notices it first says so; the others, that this one has ended.
        self.assertRegex("\n".join(last.values()), expected)
        for name, line in last.items():
            with self.subTest(name):
                self.assertRegex(line, f"{expected}|worker . at .* is gone")


if __name__ == "__main__":
    absltest.main()
