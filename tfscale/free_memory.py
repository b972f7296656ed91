"""The free memory of the host that this process may still take."""

import pathlib
import resource
from collections.abc import Iterator

# Names in the folder of a control group, of version 2 and version 1: its limit,
# its use, and pages of files, which are in use and which the kernel gives back.
_CGROUPS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}
_GROUPS_OF_PROCESS = "/proc/self/cgroup"


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
    free = [available, *_left_by_groups(cgroup)]
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _kib("/proc/self/status", "VmSize")
    if allowed != resource.RLIM_INFINITY and used is not None:
        free.append(allowed - used)
    return max(min(free), 0)


def _left_by_groups(cgroup: str) -> Iterator[int]:
    """Yields the bytes that each control group of this process leaves.

    A container sees its own as the outermost one. A job of Slurm or a service
    is in groups below that, and each of them may have a limit.
    """
    paths = dict.fromkeys(_CGROUPS, "/")
    for line in _lines(_GROUPS_OF_PROCESS):
        _, kinds, path = line.split(":", 2)
        paths |= dict.fromkeys(kinds.split(","), path)
    for kind, (limit, use, of_files) in _CGROUPS.items():
        innermost = pathlib.PurePath(paths[kind].strip("/"))
        for group in (innermost, *innermost.parents):
            folder = pathlib.Path(cgroup, kind, group)
            numbers = [*_lines(folder / limit), *_lines(folder / use)]
            if len(numbers) == 2 and numbers[0] != "max":
                most, used = map(int, numbers)
                stat = dict(map(str.split, _lines(folder / "memory.stat")))
                yield most - used + int(stat.get(of_files, 0))


def _kib(path, key):
    lines = dict(line.split(":", 1) for line in _lines(path) if ":" in line)
    return int(lines[key].split()[0]) << 10 if key in lines else None


def _lines(path):
    try:
        return pathlib.Path(path).read_text().splitlines()
    except OSError:  # not Linux, or no such group
        return []
