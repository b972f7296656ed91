"""A `tf.distribute.ParameterServerStrategy` that trains under Keras 3 `fit`."""

from typing import Any

import tensorflow as tf

from tfscale.cluster import ports
from tfscale.cluster.cluster import Cluster
from tfscale.cluster.coordinator import cluster_spec
from tfscale.cluster.coordinator import meet_parameter_servers
from tfscale.cluster.environment import cluster_from_environment
from tfscale.parameter_server.worker_dataset import WorkerDataset

_SECONDS_FOR_THE_OTHERS = 60.0


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """Has variables on parameter servers and steps on workers.

    Variables of its scope are placed on the servers, in turn. A model is
    wrapped in a `tfscale.ParameterServerModel`, whose steps run on the workers,
    each at its own pace: a worker reads the variables, computes gradients of a
    batch of its own and has the servers apply them, while other workers do the
    same. So a gradient may belong to weights that are some steps old. With one
    worker the numbers are those of one device.

    The program is the same in all processes. In workers and servers
    `tfscale.initialize()` does not return; in the chief it goes on to here.
    Create datasets after the strategy.

    Source: Li et al., Scaling Distributed Machine Learning with the Parameter
    Server (2014); Dean et al., Large Scale Distributed Deep Networks (2012),
    section 4.1, "Downpour SGD".

    Args:
        cluster: The `tfscale.cluster.Cluster`, with this process as its chief.
            Defaults to the cluster of the environment, as the launcher sets
            it.

    Raises:
        ConnectionError: If a worker or server does not answer in a minute,
            where TensorFlow would wait for ever; says which, and why.
        OSError: If something else has the port of this process.
        RuntimeError: If TensorFlow is connected to a cluster already.
        ValueError: If there is no cluster, it has no chief, worker or
            parameter server, this process is not the chief, or a worker has
            more than one GPU.

    Example: on a machine without a cluster it says how to start one.

    >>> import tfscale
    >>> tfscale.ParameterServerStrategy()
    Traceback (most recent call last):
    ...
    ValueError: A `ParameterServerStrategy` needs a cluster of one chief...
    """

    def __init__(self, cluster: Cluster | None = None):
        cluster = _checked(cluster or cluster_from_environment())
        ports.listen(cluster.address).close()  # clearer than TensorFlow's
        meet_parameter_servers(cluster, _SECONDS_FOR_THE_OTHERS)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            cluster_spec(cluster),
            task_type="chief",
            task_id=0,
            rpc_layer="grpc",
        )
        super().__init__(resolver)
        self._cluster = cluster
        if self.num_replicas_in_sync > 1:
            raise ValueError(
                "A worker must have one GPU at most. Received: workers with "
                f"{self.num_replicas_in_sync}. Start a worker for each GPU: "
                "`python -m tfscale.launch --num_workers=... "
                "--devices_per_worker=1`."
            )

    @property
    def cluster(self) -> Cluster:
        """The cluster, seen from the chief."""
        return self._cluster

    @property
    def num_workers(self) -> int:
        """How many workers the cluster has."""
        return len(self._cluster.jobs["worker"])

    @property
    def coordinator(self) -> tf.distribute.coordinator.ClusterCoordinator:
        """Hands steps to workers; there is one for each strategy."""
        return tf.distribute.coordinator.ClusterCoordinator(self)

    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: Any = None
    ) -> Any:
        """The batches of a dataset, dealt out to workers, for Keras.

        In a function that runs on a worker it is TensorFlow's result.
        """
        if tf.inside_function() or options is not None:
            return super().experimental_distribute_dataset(dataset, options)
        return WorkerDataset(self, dataset)


def _checked(cluster: Cluster | None) -> Cluster:
    if cluster is None:
        raise ValueError(
            "A `ParameterServerStrategy` needs a cluster of one chief, "
            "workers and parameter servers. Received: no cluster in the "
            "environment. Start the program by `python -m tfscale.launch "
            "--num_workers=2 --num_ps=1 program.py`, or set TF_CONFIG."
        )
    counts = {job: len(addresses) for job, addresses in cluster.jobs.items()}
    jobs = {"chief", "worker", "ps"}
    if {*counts} != jobs or counts["chief"] != 1 or not all(counts.values()):
        raise ValueError(
            "A `ParameterServerStrategy` needs a cluster of one 'chief' and "
            f"at least one 'worker' and one 'ps'. Received: {counts}. Use "
            "`python -m tfscale.launch --num_workers=2 --num_ps=1 "
            "program.py`, or, without servers, `tfscale.MeshStrategy`."
        )
    if cluster.job != "chief":
        raise ValueError(
            "Only the chief may create a `ParameterServerStrategy`; the "
            f"others serve. Received: {cluster.job} {cluster.index}. Call "
            "`tfscale.initialize()` first in the program; it does not return "
            "there."
        )
    return cluster
