"""The processes that train together: addresses, and which are alive."""

from tfscale.cluster.cluster import Cluster
from tfscale.cluster.environment import cluster_from_environment
from tfscale.cluster.initialize import initialize
from tfscale.cluster.preflight import preflight

__all__ = [
    "Cluster",
    "cluster_from_environment",
    "initialize",
    "preflight",
]
