"""Joins another worker, which stands still once all of them have met.

`python -m tests.cluster.standing_worker FOLDER`, by lost_worker_test.py.
"""

import os
import signal
import sys
from unittest import mock

import tensorflow as tf

import tfscale
from tfscale.cluster import cluster_from_environment


def stand_still(*arguments):
    """In the place of TensorFlow's strategy, which would join the others."""
    os.kill(os.getpid(), signal.SIGSTOP)


def main():
    if cluster_from_environment().index == 1:
        with mock.patch.object(
            tf.distribute, "MultiWorkerMirroredStrategy", stand_still
        ):
            tfscale.initialize()
    try:
        tfscale.initialize(timeout=2.0)
    finally:
        with open(os.path.join(sys.argv[1], "worker1.pid")) as file:
            os.kill(int(file.read()), signal.SIGKILL)


if __name__ == "__main__":
    main()
