"""Checks that all processes are there and agree, before any of them starts."""

import logging
from collections.abc import Callable
from collections.abc import Mapping

from tfscale.cluster.cluster import Cluster
from tfscale.cluster.rendezvous import MissingError
from tfscale.cluster.rendezvous import Rendezvous


def preflight(
    cluster: Cluster,
    facts: Mapping[str, str],
    *,
    timeout: float = 60.0,
    patience: float = 3.0,
    say: Callable[[str], None] = logging.warning,
    about: str = "",
) -> None:
    """Returns once all processes of a cluster have reached each other.

    Args:
        cluster: The cluster.
        facts: Values that must be equal in all of them, by name:
            versions and the like.
        timeout: Seconds after which a process that was not reached, or did
            not call, is an error.
        patience: Seconds after which those that are waited for are named.
        say: Called with the names of missing processes.
        about: Only processes with an equal value meet.

    Raises:
        MissingError: If a process is missing; says which, and why.
        OSError: If this process' own port is in use.
        ValueError: If a fact differs; says where, and what it is there.

    Example:

    >>> preflight(Cluster({"worker": ("localhost:0",)}, "worker", 0), {})
    """
    if len(cluster.addresses) > 1:
        rendezvous = Rendezvous(cluster, facts, about=about)
        rendezvous.meet(timeout, patience=patience, say=say)


def survivors(
    cluster: Cluster,
    facts: Mapping[str, str],
    *,
    least: int,
    timeout: float = 60.0,
    say: Callable[[str], None] = logging.warning,
) -> Cluster:
    """The cluster of the workers that have reached each other, by agreement.

        a   reaches b, and not c ──► with b, about {a, b} ──► goes on with b
        b   reaches a, and not c ──► with a, about {a, b} ──► goes on with a
        c   is lost; if it comes later, it is not answered

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
