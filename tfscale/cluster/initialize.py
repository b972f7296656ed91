"""Joins the cluster that a process was started in, once, before all else."""

import dataclasses
import os

import tensorflow as tf

from tfscale.cluster.cluster import Cluster
from tfscale.cluster.environment import cluster_from_environment
from tfscale.cluster.preflight import preflight
from tfscale.cluster.versions import versions
from tfscale.mesh import use_virtual_devices

# Set by the launcher where there are no accelerators to give to a worker.
_VIRTUAL_DEVICES = "TFSCALE_VIRTUAL_DEVICES"


@dataclasses.dataclass(frozen=True)
class Joined:
    """The workers that this process has joined.

    Attributes:
        cluster: Who they are.
        strategy: TensorFlow's own strategy over them. It is not trained with:
            making it starts the server of this process, by which workers
            exchange tensors and learn that one of them is gone.
    """

    cluster: Cluster
    strategy: tf.distribute.Strategy


# A process is in one cluster, as it has one TensorFlow.
_joined: Joined | None = None


def initialize(*, timeout: float = 60.0) -> None:
    """Joins the other workers; to be called before anything of TensorFlow.

    Every worker runs the same program. Behind this, `tfscale.device_mesh`
    counts the devices of all workers, and a `tfscale.MeshStrategy` trains over
    them. The cluster is that of `TF_CONFIG`, of a step of Slurm, or of an
    indexed job of Kubernetes; `python -m tfscale.launch` sets the first. Where
    there is none, or one of a single process, nothing is joined, so that the
    same program runs on one machine.

    Where the launcher was given `--devices_per_worker` and there are no
    accelerators, this makes as many virtual devices. A second call does
    nothing.

    Args:
        timeout: Seconds after which a worker that is not there is an error.

    Raises:
        ConnectionError: If a worker is missing; says which, and why.
        OSError: If this process' own port is in use.
        RuntimeError: If TensorFlow has started its devices already.
        ValueError: If what is set makes no cluster of workers, or versions
            differ between them; says where.

    Example: without a cluster it does nothing.

    >>> import tfscale
    >>> tfscale.initialize()
    """
    global _joined
    if _joined is not None:
        return
    if _VIRTUAL_DEVICES in os.environ:
        use_virtual_devices(int(os.environ[_VIRTUAL_DEVICES]))
    cluster = cluster_from_environment()
    if cluster is None or len(cluster.addresses) == 1:
        return
    _check_jobs(cluster)
    preflight(cluster, versions(), timeout=timeout)
    _joined = Joined(cluster, _join(cluster))


def joined() -> Joined | None:
    """The workers that `initialize` has joined, if there are any.

    Example:

    >>> joined() is None
    True
    """
    return _joined


def _check_jobs(cluster):
    others = sorted(set(cluster.jobs) - {"chief", "worker"})
    if others:
        raise ValueError(
            "Workers that all run the same program are the jobs 'chief' and "
            f"'worker'. Received: a cluster with {others}. Parameter servers "
            "have a strategy of their own, which joins by itself."
        )


def _join(cluster):
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({j: list(a) for j, a in cluster.jobs.items()}),
        task_type=cluster.job,
        task_id=cluster.index,
        rpc_layer="grpc",
    )
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(resolver)
    except RuntimeError as error:
        raise RuntimeError(
            "`tfscale.initialize` must come before TensorFlow starts its "
            "devices (with the first tensor, variable or list of logical "
            f"devices). Received: {error} Call it first thing after the "
            "imports."
        ) from error
