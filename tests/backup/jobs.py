"""Trainings that are killed and started again, each in a process of its own.

A process for each would import TensorFlow again, for seconds. So one imports it
and becomes each training by a fork, before TensorFlow has started.
"""

import json
import os
import signal
import subprocess
import sys

import numpy as np

from tests.source_files import REPOSITORY

_SERVER = """
import functools, json, sys
import keras, numpy, tensorflow, tfscale
from tests import forked_processes
from tests.backup import trainings

for line in sys.stdin:
    train = functools.partial(trainings.train, **json.loads(line))
    print(json.dumps(forked_processes.output_of(train)), flush=True)
"""


class Killed(Exception):
    """A training was killed, as it was asked to be."""


class Jobs:
    """Runs trainings of `trainings.train`, one after the other."""

    def __init__(self):
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=REPOSITORY,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            text=True,
        )

    def close(self):
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()

    def run(self, **arguments):
        """What a training returned; raises if it was killed, or failed."""
        self._server.stdin.write(json.dumps(arguments) + "\n")
        self._server.stdin.flush()
        status, said = json.loads(self._server.stdout.readline())
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            raise Killed(said)
        lines = said.splitlines()
        results = [line for line in lines if line.startswith("RESULT ")]
        if status or not results:
            raise RuntimeError(f"{os.waitstatus_to_exitcode(status)}: {said}")
        return {**json.loads(results[-1][7:]), "said": said}


def assert_close(value, expected, rtol):
    """Equal, relative to the largest magnitude in the tensor."""
    value, expected = np.asarray(value), np.asarray(expected)
    limit = rtol * np.abs(expected).max()
    np.testing.assert_allclose(value, expected, rtol=0, atol=limit)
