"""A cluster as data: the addresses of its processes, and which one this is."""

import collections
import dataclasses
import json
import re
from collections.abc import Mapping

JOBS = ("chief", "worker", "ps", "evaluator")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The contents of `TF_CONFIG`, checked.

    Args:
        jobs: For each job, "chief", "worker", "ps" or "evaluator", the
            addresses `host:port` of its tasks. They are the same, in the same
            order, in all processes.
        job: The job of this process.
        index: Its index in the addresses of its job.

    Raises:
        ValueError: If the jobs make no cluster, or the task is none of them.

    Example:

    >>> cluster = Cluster({"worker": ("a:2222", "b:2222")}, "worker", 1)
    >>> cluster.address
    'b:2222'
    >>> Cluster.from_tf_config(cluster.to_tf_config()) == cluster
    True
    """

    jobs: Mapping[str, tuple[str, ...]]
    job: str
    index: int

    def __post_init__(self):
        unknown = [job for job in self.jobs if job not in JOBS]
        if unknown or not self.jobs:
            raise ValueError(
                f"The jobs of a cluster must be among {JOBS}. Received: "
                f"{unknown or self.jobs!r}."
            )
        for address in self.addresses:
            if not _is_address(address):
                raise ValueError(
                    "An address of a cluster must be 'host:port', of IPv6 "
                    "'[host]:port', the port below 65536. "
                    f"Received: {_short(address)}."
                )
        times = collections.Counter(self.addresses)
        twice = [address for address, count in times.items() if count > 1]
        if twice:
            raise ValueError(
                "Each process of a cluster must have its own address. "
                f"Received: {twice[0]!r} more than once."
            )
        counts = {job: len(addresses) for job, addresses in self.jobs.items()}
        size = counts.get(self.job, 0)
        if not (type(self.index) is int and 0 <= self.index < size):
            raise ValueError(
                "The task of a process must be one of its cluster. Received: "
                f"task {self.index!r} of job {self.job!r}, which has {size} "
                f"tasks; the cluster is {counts}."
            )

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of all processes, job by job."""
        return tuple(a for job in self.jobs.values() for a in job)

    @property
    def address(self) -> str:
        """The address of this process."""
        return self.jobs[self.job][self.index]

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what is written once."""
        if "chief" in self.jobs:
            return self.job == "chief"
        return self.job == "worker" and self.index == 0

    def to_tf_config(self) -> str:
        """The JSON that TensorFlow expects in the variable `TF_CONFIG`."""
        return json.dumps(
            {
                "cluster": dict(self.jobs),
                "task": {"type": self.job, "index": self.index},
                "rpc_layer": "grpc",
            }
        )

    @classmethod
    def from_tf_config(cls, text: str) -> "Cluster | None":
        """Reads `TF_CONFIG`.

        Args:
            text: JSON with "cluster" and "task".

        Returns:
            The cluster; None if it names no process at all, as `{}` does.

        Raises:
            ValueError: If it is no JSON, or lacks what makes a cluster.
        """
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"TF_CONFIG must be JSON. Received: {_short(text)}, which is "
                f"invalid at character {error.pos}: {error.msg}."
            ) from None
        except (RecursionError, ValueError) as error:
            raise ValueError(
                f"TF_CONFIG must be JSON. Received: {_short(text)}, which "
                f"cannot be read: {error}."
            ) from None
        if not isinstance(config, dict):
            raise ValueError(f"TF_CONFIG must be a JSON object. {_got(config)}")
        jobs = config.get("cluster") or {}
        if not jobs:
            return None
        task = config.get("task")
        if (
            not isinstance(task, dict)
            or not isinstance(task.get("type"), str)
            or "index" not in task
        ):
            raise ValueError(
                "TF_CONFIG must give this process's task in the cluster, as "
                "in "
                '{"cluster": ..., "task": {"type": "worker", "index": 0}}. '
                f"{_got(config)}"
            )
        if not isinstance(jobs, dict) or not all(
            isinstance(addresses, list)
            and all(isinstance(address, str) for address in addresses)
            for addresses in jobs.values()
        ):
            raise ValueError(
                "The cluster of TF_CONFIG must map each job to a list of "
                'addresses, as in {"worker": ["host:2222", "other:2222"]}. '
                f"{_got(jobs)}"
            )
        jobs = {job: tuple(addresses) for job, addresses in jobs.items()}
        index = task["index"]
        if isinstance(index, str) and index.isdecimal():  # as TensorFlow does
            index = int(index)
        return cls(jobs, task["type"], index)


def _is_address(text):
    host, _, port = text.rpartition(":")
    if ":" in host and not re.fullmatch(r"\[[^\[\]]+\]", host):
        return False  # Of IPv6, whose port has no clear beginning.
    # Of few digits: others are no numbers to Python.
    return (
        bool(host and re.fullmatch("[0-9]{1,5}", port)) and int(port) < 65_536
    )


def _short(value):
    text = repr(value)
    return text if len(text) <= 1_000 else f"{text[:1_000]}..."


def _got(value):
    return f"Received: {_short(value)}."
