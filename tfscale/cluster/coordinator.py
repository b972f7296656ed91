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
import json
import logging
import os
import signal
import sys
from typing import NoReturn

import tensorflow as tf

from tfscale._internals import attributes
from tfscale.cluster import ports
from tfscale.cluster.cluster import Cluster
from tfscale.cluster.rendezvous import Rendezvous

# The chief may take long before it calls.
_SECONDS_FOR_THE_CHIEF = 600.0
# A machine that does not answer may come back, as workers may.
_SECONDS_OF_SILENCE = 60
_SECONDS_WITHOUT_WORDS = 10.0
# Where the chief of parameter servers has met them.
_servers: Rendezvous | None = None


def coordinate(
    cluster: Cluster, rendezvous: Rendezvous, timeout: float
) -> None:
    """Connects the coordinator to all other processes; these serve.

    All have met. It returns in the coordinator only (the chief, or
    else worker 0), where the devices of all processes are then logical devices
    of TensorFlow. A server exits at the end.
    """
    if not cluster.is_chief:
        # A signal that ends a job reaches all of its processes, and the
        # coordinator may still save values from this one.
        signal.signal(signal.SIGTERM, _note_signal)
        _serve(cluster, rendezvous)
    _end_at_exit(rendezvous)
    rendezvous.listen(_report)
    rendezvous.wait_until_ready(timeout, "servers")
    tf.config.experimental_connect_to_cluster(
        cluster_spec(cluster),
        job_name=cluster.job,
        task_index=cluster.index,
        protocol="grpc",
    )


def coordinator_of(cluster: Cluster) -> str:
    """The address of the process that coordinates."""
    return cluster.jobs["chief" if "chief" in cluster.jobs else "worker"][0]


def cluster_spec(cluster: Cluster) -> tf.train.ClusterSpec:
    """The cluster as TensorFlow takes it."""
    return tf.train.ClusterSpec({j: list(a) for j, a in cluster.jobs.items()})


def serve_with_parameters(cluster: Cluster) -> NoReturn:
    """Serves the chief of parameter servers, in one of its other processes."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    chief = coordinator_of(cluster)
    rendezvous = _rendezvous(cluster, called=(), callers=(chief,))
    rendezvous.meet(
        _SECONDS_FOR_THE_CHIEF, patience=_SECONDS_WITHOUT_WORDS, first=chief
    )
    # Each step holds a thread here while it runs elsewhere.
    _serve(
        cluster,
        rendezvous,
        max(threads or os.cpu_count() or 1, len(cluster.addresses) + 1),
    )


def meet_parameter_servers(cluster: Cluster, timeout: float) -> None:
    """Returns once all workers and parameter servers are connected.

    Those that are lost later are connected again when they come back.
    """
    global _servers
    others = [a for a in cluster.addresses if a != cluster.address]
    if _servers is None:
        rendezvous = _rendezvous(cluster, called=others, callers=())
        rendezvous.meet(
            timeout, patience=_SECONDS_WITHOUT_WORDS, first=cluster.address
        )
        _servers = rendezvous
        _end_at_exit(_servers)
        _servers.listen(_note_lost, calls_again=True)
    _servers.wait_until_ready(timeout, "workers and parameter servers")


def _serve(
    cluster: Cluster, rendezvous: Rendezvous, min_threads: int = 0
) -> NoReturn:
    config = attributes.options_of_process()
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
    rendezvous.tell("ready")
    rendezvous.wait_for_end()
    del server
    sys.exit(0)


def _rendezvous(cluster, **calls):
    """The rendezvous of a chief with its workers and parameter servers."""
    addresses = json.dumps([cluster.jobs[job] for job in sorted(cluster.jobs)])
    return Rendezvous(
        cluster, {}, about=addresses, silence=_SECONDS_OF_SILENCE, **calls
    )


def _note_lost(address, machine_answers):
    del machine_answers
    logging.warning("%s is lost, and is called until it is back.", address)


def _end_at_exit(rendezvous):
    """Ends the others with this process; they fail if its program fails.

    Python keeps the exception that has ended a program. A code that the program
    gives to `sys.exit` is its own.
    """
    atexit.register(lambda: rendezvous.end(getattr(sys, "last_value", None)))


def _note_signal(number, frame):
    del number, frame
    logging.warning("SIGTERM: serving on until the coordinator has ended.")


def _report(address, machine_answers):
    """Logs which server is lost.

    If its machine is silent, TensorFlow would wait for many minutes (TCP): its
    connections are closed, and what waits for them fails.
    """
    logging.error(
        "A server must run until its coordinator ends. Received: %s %s. See "
        "its last output. Start all processes again; with "
        "`tfscale.callbacks.BackupAndRestore` they continue from the last "
        "backup.",
        address,
        "has ended" if machine_answers else "does not answer any more",
    )
    if not machine_answers:
        ports.cut_off(address)
