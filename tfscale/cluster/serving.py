"""Serving: a process lends its devices to a chief, and ends with it."""

import sys
from typing import NoReturn

import tensorflow as tf

from tfscale import _internals
from tfscale.cluster.cluster import Cluster
from tfscale.cluster.liveness.presence import Presence


def serve(
    cluster: Cluster, presence: Presence, *, min_threads: int = 0
) -> NoReturn:
    """Serves the chief of a cluster until it ends; does not return.

    TensorFlow's server has what this process was set up with: devices, virtual
    ones too, memory, threads.

    Args:
        cluster: The cluster; this process is not its chief.
        presence: The connection with the chief.
        min_threads: Between operations it has as many threads, or more.

    Raises:
        ConnectionError: If the chief has failed, or is lost.
        SystemExit: With 0, once the chief has ended well.
    """
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(_internals.eager_context.context().config)
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


def cluster_spec(cluster: Cluster) -> tf.train.ClusterSpec:
    """The cluster as TensorFlow takes it.

    Example:

    >>> from tfscale.cluster import Cluster
    >>> spec = cluster_spec(Cluster({"worker": ("a:1",)}, "worker", 0))
    >>> spec.as_dict()
    {'worker': ['a:1']}
    """
    return tf.train.ClusterSpec({j: list(a) for j, a in cluster.jobs.items()})
