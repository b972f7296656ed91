"""Costs of links between devices, and of the devices, for a plan."""

import dataclasses
import math
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Costs:
    """Latencies and bandwidths, in seconds and bytes per second.

    A device sends one thing after the other and gets one thing after the
    other, both at once; latencies of several things on their way overlap.

    Args:
        latency: Time from the moment at which the last byte has left to the
            one at which it is of use: one number, or a function of source and
            target.
        bandwidth: Of a link: one number, or a function of source and target.
        memory_bandwidth: How fast a device reads and writes its memory. To
            add up k chunks it reads k and writes one; to put a tensor together
            it reads and writes all of it. Nothing is written to cut it: a
            chunk is a view.
        overhead: Time for which a message, to cut, to add up and to put
            together each keep a core busy, whatever their size (o of LogP).
        num_cores: How many cores do the work of all devices, one thing at a
            time each, and read and write at `memory_bandwidth` each. By default
            every device has one of its own.

    Raises:
        ValueError: If a latency or an overhead is negative, a bandwidth not
            above 0, or if there is no core.

    Source of the terms: Culler et al., LogP: towards a realistic model of
    parallel computation (1993).

    Example: two machines of four devices, and a slow wire in between.

    >>> def bandwidth(source, target):
    ...     return 100e9 if source // 4 == target // 4 else 10e9
    >>> costs = Costs(latency=5e-6, bandwidth=bandwidth)
    >>> costs.latency_of(0, 1), costs.bandwidth_of(3, 4)
    (5e-06, 10000000000.0)
    """

    latency: float | Callable[[int, int], float]
    bandwidth: float | Callable[[int, int], float]
    memory_bandwidth: float = math.inf
    overhead: float = 0.0
    num_cores: int | None = None

    def __post_init__(self):
        latency = 0.0 if callable(self.latency) else self.latency
        for name, value in (("latency", latency), ("overhead", self.overhead)):
            if not value >= 0:
                raise ValueError(
                    f"`{name}` must not be negative. Received: {name}={value}."
                )
        if self.num_cores is not None and self.num_cores < 1:
            raise ValueError(
                "`num_cores` must be at least 1, or None for one for each "
                f"device. Received: num_cores={self.num_cores}."
            )
        bandwidth = 1.0 if callable(self.bandwidth) else self.bandwidth
        for name, value in (
            ("bandwidth", bandwidth),
            ("memory_bandwidth", self.memory_bandwidth),
        ):
            if not value > 0:
                raise ValueError(
                    f"`{name}` must be above 0, in bytes per second. Received: "
                    f"{name}={value}."
                )

    def latency_of(self, source: int, target: int) -> float:
        """Latency of a link in seconds."""
        return _of_link(self.latency, source, target)

    def bandwidth_of(self, source: int, target: int) -> float:
        """Bandwidth of a link in bytes per second."""
        return _of_link(self.bandwidth, source, target)


def _of_link(value, source, target):
    return value(source, target) if callable(value) else value
