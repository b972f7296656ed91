"""The free memory of the host that this process may still take."""

import pathlib
import resource

# A container's limit and use, cgroup version 2 and version 1.
_CGROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def free_bytes(
    cgroup: str = "/sys/fs/cgroup", available: int | None = None
) -> int | None:
    """Bytes that machine, control groups and address space leave, at least 0.

    None if the system does not say it. `available` is what the machine has,
    measured if it is None.
    """
    if available is None:
        available = _kib("/proc/meminfo", "MemAvailable")
    if available is None:
        return None
    free = [available]
    for names in _CGROUPS:
        limit, use = (_number(pathlib.Path(cgroup) / name) for name in names)
        if limit is not None and use is not None:
            free.append(limit - use)
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _kib("/proc/self/status", "VmSize")
    if allowed != resource.RLIM_INFINITY and used is not None:
        free.append(allowed - used)
    return max(min(free), 0)


def _kib(path, key):
    try:
        with open(path) as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        return int(lines[key].split()[0]) << 10
    except (OSError, KeyError):  # not Linux
        return None


def _number(path):
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # none there, or "max": no limit
        return None
