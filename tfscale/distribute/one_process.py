"""What does not work over several workers yet says so."""

from typing import Any


def check(strategy: Any, what: str, instead: str) -> None:
    """Raises if a strategy is one over several workers.

    Raises:
        ValueError: If it is.
    """
    if getattr(strategy.extended, "has_workers", False):
        raise ValueError(
            f"{what} is for one process. Received: a MeshStrategy over "
            f"{strategy.extended.workers.count} workers. {instead}"
        )
