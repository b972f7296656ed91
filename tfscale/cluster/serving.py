"""What workers and parameter servers do: they serve until the chief ends.

A server knows no end of its own. That the chief is there shows in that its
port answers; the system closes it when the process ends, however it ended. So
a server asks now and then, which one that was started again can do as well:

    the chief's port   refused ... answers ... answers ... refused
    a server           waits       serves                  exits with 0
"""

import logging
import os
import socket
import sys
import threading
import time
from typing import NoReturn

import tensorflow as tf

from tfscale import _internals
from tfscale.cluster.cluster import Cluster

_SECONDS_BETWEEN_LOOKS = 1.0
# A machine that does not answer at all may come back; a closed port does not.
_SECONDS_OF_SILENCE = 60.0


def serve(cluster: Cluster, timeout: float = 600.0) -> NoReturn:
    """Serves the chief of a cluster with parameter servers, until it ends.

    Args:
        cluster: The cluster; this process is a worker or a server of it.
        timeout: Seconds in which the chief must begin to answer.

    Raises:
        ConnectionError: If it does not, or falls silent.
        SystemExit: With 0, once the chief has ended.
    """
    chief = cluster.jobs["chief"][0]
    server = tf.distribute.Server(
        cluster_spec(cluster),
        cluster.job,
        cluster.index,
        protocol="grpc",
        config=_config(cluster),
    )
    _wait(chief, timeout)
    answered = time.monotonic()
    while True:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        refused = _ask(chief)
        if refused is None:
            answered = time.monotonic()
        elif refused:
            break
        elif time.monotonic() - answered > _SECONDS_OF_SILENCE:
            raise ConnectionError(
                "The chief must answer as long as it is served. Received: "
                f"nothing from {chief} for {_SECONDS_OF_SILENCE:g} s. Look "
                "at what it printed, and at the network."
            )
    del server
    sys.exit(0)


def wait_for_servers(cluster: Cluster, timeout: float) -> None:
    """Returns once all workers and parameter servers of a chief answer.

    Args:
        cluster: The cluster; this process is its chief.
        timeout: Seconds after which one that does not is an error.

    Raises:
        ConnectionError: If one does not; says which, and why.
    """
    others = [a for a in cluster.addresses if a != cluster.address]
    missing = dict.fromkeys(others, "not tried yet")
    over = threading.Event()

    def reach(address):
        while not over.is_set():
            try:
                _connect(address)
            except OSError as error:
                missing[address] = _reason(error)
                over.wait(0.1)
            else:
                del missing[address]
                return

    threads = [
        threading.Thread(target=reach, args=(address,), daemon=True)
        for address in others
    ]
    start = time.monotonic()
    said = False
    for thread in threads:
        thread.start()
    while missing:
        waited = time.monotonic() - start
        found = "; ".join(f"{a} ({why})" for a, why in missing.copy().items())
        if waited > timeout:
            over.set()
            raise ConnectionError(
                "All workers and parameter servers must be there. Received: "
                f"after {timeout:g} s, still missing: {found}. Start them, or "
                "correct the addresses."
            )
        if waited > 10.0 and not said:
            said = True
            logging.warning("Waiting for %s.", found)
        time.sleep(0.02)


def cluster_spec(cluster: Cluster) -> tf.train.ClusterSpec:
    """The cluster as TensorFlow takes it.

    Example:

    >>> from tfscale.cluster import Cluster
    >>> spec = cluster_spec(Cluster({"worker": ("a:1",)}, "worker", 0))
    >>> spec.as_dict()
    {'worker': ['a:1']}
    """
    return tf.train.ClusterSpec({j: list(a) for j, a in cluster.jobs.items()})


def answers(address: str) -> bool:
    """Whether something listens at an address `host:port`.

    Example:

    >>> answers("localhost:1")
    False
    """
    return _ask(address) is None


def _config(cluster):
    """As this process was set up: devices, memory, threads.

    But for those between operations: a step takes one here as long as it runs
    elsewhere, and with a single one nothing goes on.
    """
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(_internals.eager_context.context().config)
    config.inter_op_parallelism_threads = max(
        config.inter_op_parallelism_threads or os.cpu_count() or 1,
        len(cluster.addresses) + 1,
    )
    return config


def _wait(chief, timeout):
    end = time.monotonic() + timeout
    while _ask(chief) is not None:
        if time.monotonic() > end:
            raise ConnectionError(
                "Workers and parameter servers must have a chief. Received: "
                f"no answer from {chief} for {timeout:g} s. Start it, and make "
                "a `tfscale.ParameterServerStrategy` there."
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _ask(address):
    """None if it answers, or else whether the port is closed."""
    try:
        _connect(address)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return None


def _connect(address):
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), 2.0).close()


def _reason(error):
    if isinstance(error, socket.gaierror):
        return "its name cannot be resolved"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens at its port"
    if isinstance(error, TimeoutError):
        return "no answer"
    return error.strerror or str(error)
