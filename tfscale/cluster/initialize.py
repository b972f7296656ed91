"""Joins the cluster that a process was started in, once, before all else."""

import atexit
import dataclasses
import os
import platform
import signal
import threading

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._version import __version__
from tfscale.cluster.cluster import Cluster
from tfscale.cluster.coordination import Coordination
from tfscale.cluster.coordinator import cluster_spec
from tfscale.cluster.coordinator import coordinate
from tfscale.cluster.coordinator import coordinator_of
from tfscale.cluster.coordinator import meet_parameter_servers
from tfscale.cluster.coordinator import serve_with_parameters
from tfscale.cluster.environment import cluster_from_environment
from tfscale.cluster.failure_detector import FailureDetector
from tfscale.cluster.rendezvous import Rendezvous
from tfscale.cluster.virtual_devices import use_virtual_devices

# Set by the launcher for workers without accelerators.
_VIRTUAL_DEVICES = "TFSCALE_VIRTUAL_DEVICES"


@dataclasses.dataclass(frozen=True, eq=False)
class Joined:
    """The workers that this process has joined."""

    cluster: Cluster
    # TensorFlow's own strategy over them. It does not train: creating it starts
    # the server of this process, by which workers exchange tensors.
    strategy: tf.distribute.Strategy
    failure_detector: FailureDetector
    coordination: Coordination


# A process is in one cluster, since it has one TensorFlow.
_joined: Joined | None = None
_coordinated: Cluster | None = None


def initialize(*, coordinator: bool = False, timeout: float = 60.0) -> None:
    """Joins the other processes; to be called before anything of TensorFlow.

    There are two ways to work together, for which the same program is started
    in every process:

    * As workers: each runs the program. After this, `tfscale.device_mesh`
      counts the devices of all workers, and a `tfscale.MeshStrategy` trains
      over them. Rows of stages and of model ranks lie within a worker.
    * By a coordinator, the first process: it alone runs the program, and the
      devices of all processes are its own. In the others this does not
      return; they lend it their devices and exit with 0 when it ends. A row
      of stages or of model ranks may lie over several machines.

    The cluster is that of `TF_CONFIG`, of a step of Slurm, or of an
    indexed job of Kubernetes; `python -m tfscale.launch` sets the first. Where
    there is none, or one of a single process, nothing is joined, so that the
    same program runs on one machine.

    In a cluster with parameter servers only the chief goes on, to make a
    `tfscale.ParameterServerStrategy`. Workers and servers serve it and exit
    with it: with 0 if it ends well, and else with an error.

    Where the launcher was given `--devices_per_worker` and there are no
    accelerators, this makes as many virtual devices. A second call does
    nothing.

    Args:
        coordinator: Whether the first process coordinates the others. It must
            be the same in all of them.
        timeout: Seconds after which a process that is not there is an error.

    Raises:
        ConnectionError: If a process is missing; says which, and why. With
            `coordinator` or parameter servers, in the others, if the first
            one fails or is lost.
        OSError: If this process' own port is in use.
        RuntimeError: If TensorFlow has started its devices already.
        ValueError: If what is set makes no cluster of workers, or versions
            or `coordinator` differ between them; says where.
        SystemExit: With `coordinator` or parameter servers, in all processes
            but the first, when that one ends.

    Example: without a cluster it does nothing.

    >>> import tfscale
    >>> tfscale.initialize()
    """
    global _joined, _coordinated
    if _joined is not None or _coordinated is not None:
        return
    if _VIRTUAL_DEVICES in os.environ:
        use_virtual_devices(int(os.environ[_VIRTUAL_DEVICES]))
    cluster = cluster_from_environment()
    if cluster is None or len(cluster.addresses) == 1:
        return
    _check_jobs(cluster, coordinator)
    if "ps" in cluster.jobs:
        if not cluster.is_chief:
            serve_with_parameters(cluster)
        meet_parameter_servers(cluster, timeout)
        return
    _check_not_started()
    facts = {"`coordinator` of `tfscale.initialize`": str(coordinator)}
    rendezvous = Rendezvous(cluster, {**versions(), **facts})
    rendezvous.meet(timeout, first=coordinator_of(cluster))
    if coordinator:
        coordinate(cluster, rendezvous, timeout)
        _coordinated = cluster
    else:
        detector = FailureDetector(cluster, rendezvous)
        # A chief is the first worker.
        jobs = cluster.jobs
        workers = [*jobs.get("chief", ()), *jobs.get("worker", ())]
        coordination = Coordination(
            len(workers),
            workers.index(cluster.address),
            detector.check_all_there,
            lambda worker: detector.is_awaited_by(workers[worker]),
        )
        strategy = _join(cluster, detector, timeout)
        _joined = Joined(cluster, strategy, detector, coordination)
        atexit.register(coordination.leave, detector.is_missed)
        atexit.register(detector.leave)


def versions() -> dict[str, str]:
    """Versions that have to be equal in all processes, by name."""
    return {
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
        "version of TensorFlow": tf.__version__,
        "version of Keras": keras.__version__,
        "version of tfscale": __version__,
    }


def joined() -> Joined | None:
    """The workers that `initialize` has joined, if there are any."""
    return _joined


def coordinated() -> Cluster | None:
    """The cluster whose devices are this process' own, if there is one."""
    return _coordinated


def _check_not_started():
    """Raises if TensorFlow has started its devices: their names change."""
    threading = tf.config.threading
    count = threading.get_inter_op_parallelism_threads()
    try:
        # The setting can change until devices have started.
        threading.set_inter_op_parallelism_threads(count + 1)
    except RuntimeError as error:
        raise RuntimeError(
            "`tfscale.initialize` must be called before TensorFlow starts its "
            "devices (with the first tensor, variable or list of logical "
            "devices). Received: a later call. Call it right after the "
            "imports."
        ) from error
    threading.set_inter_op_parallelism_threads(count)


def _check_jobs(cluster, coordinator):
    has_servers = "ps" in cluster.jobs
    known = {"chief", "worker"} | ({"ps"} if has_servers else set())
    others = sorted(set(cluster.jobs) - known)
    if others or (has_servers and len(cluster.jobs.get("chief", ())) != 1):
        raise ValueError(
            "A cluster must have the jobs 'chief' and 'worker', or, with "
            "parameter servers, 'chief', 'worker' and 'ps' with one 'chief'. "
            f"Received: a cluster of {sorted(cluster.jobs)}."
        )
    if has_servers and coordinator:
        raise ValueError(
            "`coordinator` must be False in a cluster with parameter servers, "
            "whose chief uses no other process' devices. Received: "
            "coordinator=True in a cluster with 'ps'. Remove it, or start the "
            "program without --num_ps."
        )


def _join(cluster, detector, timeout):
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster_spec(cluster),
        task_type=cluster.job,
        task_id=cluster.index,
        rpc_layer="grpc",
    )
    # TensorFlow ignores SIGTERM: workers outlived it.
    handler = signal.getsignal(signal.SIGTERM)
    jobs = {job: len(cluster.jobs[job]) for job in sorted(cluster.jobs)}
    leader = f"/job:{next(iter(jobs))}/replica:0/task:0"  # chief, or worker 0
    attributes.limit_joining(jobs, leader, timeout)
    with detector.joining(timeout):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
    return strategy
