"""One process, the chief, runs the program on the devices of all processes.

    the chief                        workers and servers
    initialize returns               initialize serves
    the program, its data            ◄── parts of functions, tensors ──►
    atexit: "end"             ─────► exit 0

TensorFlow's runtime partitions a function by device, each task runs its
partition, and the tasks send each other tensors by gRPC. Workers of parameter
servers may be lost and come back; a coordinator's servers cannot.
"""

import atexit
import hashlib
import json
import logging
import os
import signal
import sys
from typing import NoReturn

import tensorflow as tf

from tfscale._internals import symbols
from tfscale.cluster.cluster import Cluster
from tfscale.cluster.liveness import ports
from tfscale.cluster.liveness.presence import Presence
from tfscale.cluster.liveness.presence import Roster

# The chief may take long before it calls.
_SECONDS_FOR_THE_CHIEF = 600.0
# A machine that does not answer may come back, as workers may.
_SECONDS_OF_SILENCE = 60
# For a chief with parameter servers.
_roster: Roster | None = None


def coordinate(cluster: Cluster, timeout: float, word: str) -> None:
    """Connects the coordinator to all other processes; these serve.

    Called after the preflight, whose word is `word`. It returns in the
    coordinator only (the chief, or else worker 0), where the devices of all
    processes are then logical devices of TensorFlow. A server exits at the end.
    """
    if not cluster.is_chief:
        chief = coordinator_of(cluster)
        presence = Presence(cluster.address, chief, timeout, word)
        # A signal that ends a job reaches all of its processes, and the
        # coordinator may still save values from this one.
        signal.signal(signal.SIGTERM, _note_signal)
        _serve(cluster, presence)
    roster = Roster(word)
    _end_at_exit(roster)
    roster.wait_for(_others(cluster), timeout)
    tf.config.experimental_connect_to_cluster(
        cluster_spec(cluster),
        job_name=cluster.job,
        task_index=cluster.index,
        protocol="grpc",
    )
    roster.watch(_report)


def coordinator_of(cluster: Cluster) -> str:
    """The address of the process that coordinates."""
    return cluster.jobs["chief" if "chief" in cluster.jobs else "worker"][0]


def cluster_spec(cluster: Cluster) -> tf.train.ClusterSpec:
    """The cluster as TensorFlow takes it."""
    return tf.train.ClusterSpec({j: list(a) for j, a in cluster.jobs.items()})


def serve_with_parameters(cluster: Cluster) -> NoReturn:
    """Serves the chief of parameter servers, in one of its other processes."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    presence = Presence(
        cluster.address,
        coordinator_of(cluster),
        _SECONDS_FOR_THE_CHIEF,
        _word(cluster),
        _SECONDS_OF_SILENCE,
    )
    # Each step holds a thread here while it runs elsewhere.
    _serve(
        cluster,
        presence,
        max(threads or os.cpu_count() or 1, len(cluster.addresses) + 1),
    )


def meet_parameter_servers(cluster: Cluster, timeout: float) -> None:
    """Returns once all workers and parameter servers are connected.

    Those that are lost later are connected again when they come back.
    """
    global _roster
    if _roster is None:
        others = "workers and parameter servers"
        _roster = Roster(_word(cluster), others, _SECONDS_OF_SILENCE)
        _end_at_exit(_roster)
    _roster.wait_for(_others(cluster), timeout)
    _roster.watch()


def _serve(
    cluster: Cluster, presence: Presence, min_threads: int = 0
) -> NoReturn:
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(symbols.eager_context.context().config)
    config.inter_op_parallelism_threads = max(
        config.inter_op_parallelism_threads, min_threads
    )
    server = tf.distribute.Server(
        cluster_spec(cluster),
        cluster.job,
        cluster.index,
        protocol="grpc",
        config=config,
    )
    presence.be_ready()
    presence.wait_for_end()
    del server
    sys.exit(0)


def _others(cluster):
    return [a for a in cluster.addresses if a != cluster.address]


def _word(cluster):
    """A random word that distinguishes the processes of two clusters."""
    addresses = json.dumps([cluster.jobs[job] for job in sorted(cluster.jobs)])
    return hashlib.sha256(addresses.encode()).hexdigest()


def _end_at_exit(roster):
    """Ends the others with this process; they fail if its program fails.

    Python keeps the exception that has ended a program. A code that the program
    gives to `sys.exit` is its own.
    """
    atexit.register(lambda: roster.end(getattr(sys, "last_value", None)))


def _note_signal(number, frame):
    del number, frame
    logging.warning("SIGTERM: serving on until the coordinator has ended.")


def _report(address, machine_answers):
    """Logs which server is lost.

    If its machine is silent, TensorFlow would wait for many minutes (TCP): its
    connections are closed, and what waits for them fails.
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
        ports.cut_off(address)
