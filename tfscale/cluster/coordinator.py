"""One process runs the program, all others lend it their devices.

    task 0: the coordinator          tasks 1, 2, ...: servers
    initialize returns               initialize serves
    the program, its data            ◄── parts of functions, tensors ──►
    atexit: "end"             ─────► exit 0

It is TensorFlow's own runtime: a function is cut by device, each task runs its
part, and they send each other tensors by gRPC.
"""

import atexit
import functools
import logging
import os
import signal
import sys

import tensorflow as tf

from tfscale.cluster import serving
from tfscale.cluster.cluster import Cluster
from tfscale.cluster.liveness.presence import Presence
from tfscale.cluster.liveness.presence import Roster


def coordinate(cluster: Cluster, timeout: float, word: str) -> None:
    """Connects the coordinator to all other processes; these serve.

    To be called after the pre-flight. In the coordinator it returns, and the
    devices of all processes are logical devices of TensorFlow there. The
    others do not come back: they exit with 0 as the coordinator's program
    ends, and fail if it fails.

    Args:
        cluster: The cluster. Its chief, or else worker 0, coordinates.
        timeout: Seconds after which a process that is not ready is an error.
        word: That of the pre-flight.

    Raises:
        ConnectionError: If a process is missing, or in a server if the
            coordinator is lost.
        SystemExit: In a server, at the end.
    """
    if not cluster.is_chief:
        serving.serve(cluster, functools.partial(_meet, cluster, timeout, word))
    others = [a for a in cluster.addresses if a != cluster.address]
    roster = Roster(cluster.address, word)
    roster.wait_for(others, timeout)
    tf.config.experimental_connect_to_cluster(
        serving.cluster_spec(cluster),
        job_name=cluster.job,
        task_index=cluster.index,
        protocol="grpc",
    )
    roster.watch(_report)
    atexit.register(_end, roster)


def coordinator_of(cluster: Cluster) -> str:
    """The address of the process that coordinates.

    Example:

    >>> coordinator_of(Cluster({"worker": ("a:1", "b:1")}, "worker", 1))
    'a:1'
    """
    return cluster.jobs["chief" if "chief" in cluster.jobs else "worker"][0]


def _end(roster):
    """Ends the servers, but after an exception that nobody caught.

    Then the connections close as the process ends, and servers fail too, for
    whoever started them to start them again.
    """
    if getattr(sys, "last_value", None) is None:
        roster.end()


def _meet(cluster, timeout, word):
    presence = Presence(cluster.address, coordinator_of(cluster), timeout, word)
    # Who ends a job signals all of its processes, and the coordinator may want
    # to save what is here before it ends. Then this does.
    signal.signal(signal.SIGTERM, _note_signal)
    return presence


def _note_signal(number, frame):
    del number, frame
    logging.warning("SIGTERM: serving on until the coordinator has ended.")


def _report(address, machine_answers):
    """Says which server is lost.

    TensorFlow says so too if the kernel over there closed its connections.
    Where a whole machine is gone it would wait for it as long as TCP does,
    many minutes, and nothing can call it back: then the process is ended.
    """
    logging.error(
        "A server must stay until its coordinator ends. Received: %s %s. What "
        "it printed says why. Start all processes again; with "
        "`tfscale.callbacks.BackupAndRestore` they go on where the last backup "
        "was made.",
        address,
        "has ended" if machine_answers else "does not answer any more",
    )
    if not machine_answers:
        logging.shutdown()
        os._exit(1)
