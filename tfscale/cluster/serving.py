"""Serving: a process lends its devices to a chief, and ends with it.

There is one way to serve, and two to know that the chief has ended:

    by a coordinator    a connection (`presence.py`): lost processes cannot come
                        back, so an end without a word is an error, at once
    parameter servers   the chief's port (`ports.py`): one that was started
                        again knows as well as one that was there before
"""

import sys
from collections.abc import Callable
from typing import NoReturn

import tensorflow as tf

from tfscale import _internals
from tfscale.cluster.cluster import Cluster
from tfscale.cluster.liveness import ports
from tfscale.cluster.liveness.ports import ChiefPort
from tfscale.cluster.liveness.presence import Presence

_SECONDS_FOR_THE_PORT = 5.0


def serve(
    cluster: Cluster,
    meet: Callable[[], Presence | ChiefPort],
    *,
    min_threads: int = 0,
) -> NoReturn:
    """Serves the chief of a cluster until it ends; does not return.

    TensorFlow's server has what this process was set up with: devices, virtual
    ones too, memory, threads.

    Args:
        cluster: The cluster; this process is not its chief.
        meet: Waits for the chief; called when the server is there.
        min_threads: Between operations it has as many threads, or more.

    Raises:
        ConnectionError: If the chief does not come, or is lost.
        OSError: If something else has the port of this process.
        SystemExit: With 0, once the chief has ended.
    """
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(_internals.eager_context.context().config)
    config.inter_op_parallelism_threads = max(
        config.inter_op_parallelism_threads, min_threads
    )
    ports.listen(cluster.address, _SECONDS_FOR_THE_PORT).close()
    server = tf.distribute.Server(
        cluster_spec(cluster),
        cluster.job,
        cluster.index,
        protocol="grpc",
        config=config,
    )
    meet().wait_for_end()
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
