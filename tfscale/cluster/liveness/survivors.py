"""Finds the remaining workers of a cluster, by agreement.

a   reaches b, and not c ──► with b, about {a, b} ──► goes on with b
b   reaches a, and not c ──► with a, about {a, b} ──► goes on with a
c   is lost; if it comes later, it is not answered
"""

import logging
from collections.abc import Callable
from collections.abc import Mapping

from tfscale.cluster.cluster import Cluster
from tfscale.cluster.preflight import MissingError
from tfscale.cluster.preflight import preflight


def survivors(
    cluster: Cluster,
    facts: Mapping[str, str],
    *,
    least: int,
    timeout: float = 60.0,
    say: Callable[[str], None] = logging.warning,
) -> Cluster:
    """The cluster of the workers that have reached each other.

    Raises:
        ConnectionError: If too few are there, or others have found others.
        OSError: If this process' own port is in use.
        ValueError: If a fact differs.
    """
    try:
        preflight(cluster, facts, timeout=timeout, say=say)
    except MissingError as error:
        gone = error.addresses
        left = tuple(a for a in cluster.addresses if a not in gone)
        if len(left) < least:
            raise
        say(
            f"Without {', '.join(gone)}: {len(left)} of "
            f"{len(cluster.addresses)} are left, {least} at least."
        )
        cluster = Cluster(
            {"worker": left}, "worker", left.index(cluster.address)
        )
    together = ",".join(cluster.addresses)
    preflight(cluster, facts, timeout=timeout, say=say, about=together)
    return cluster
