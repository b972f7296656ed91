"""Trainings that are killed and started again, each in a process of its own."""

import json
import signal

import numpy as np

from tests import forked_python
from tests.source_files import REPOSITORY

_TRAIN = """
import json, sys
from tests.backup import trainings

trainings.train(**json.load(sys.stdin))
"""


class Killed(Exception):
    """A training was killed, as it was asked to be."""


def run(**arguments):
    """What `trainings.train` returned; raises if it was killed, or failed."""
    process = forked_python.run(
        ["-c", _TRAIN], REPOSITORY, input=json.dumps(arguments)
    )
    said = process.stdout + process.stderr
    if process.returncode == -signal.SIGKILL:
        raise Killed(said)
    results = [s for s in said.splitlines() if s.startswith("RESULT ")]
    if process.returncode or not results:
        raise RuntimeError(f"{process.returncode}: {said}")
    return {**json.loads(results[-1][7:]), "said": said}


def assert_close(value, expected, rtol):
    """Equal, relative to the largest magnitude in the tensor."""
    value, expected = np.asarray(value), np.asarray(expected)
    limit = rtol * np.abs(expected).max()
    np.testing.assert_allclose(value, expected, rtol=0, atol=limit)
