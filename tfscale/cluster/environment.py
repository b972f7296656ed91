"""Finds the cluster of a process, by its environment variables.

`TF_CONFIG` comes first, since it is set on purpose; then Slurm; then an indexed
job of Kubernetes. TensorFlow's `SlurmClusterResolver` is not used: it sorts
hosts as text, so that on `n[9-10]` task 0 gets the address of `n10`, has one
port for all jobs, and runs `nvidia-smi`. Its resolver for Kubernetes lists pods
by their phase and does not know its own.
"""

import itertools
import os
import re
from collections.abc import Mapping

from tfscale.cluster.cluster import Cluster

KUBERNETES_PORT = 2222


def cluster_from_environment(
    environ: Mapping[str, str] = os.environ,
) -> Cluster | None:
    """The cluster of this process, or None where there is none.

    * `TF_CONFIG`, as TensorFlow documents it.
    * Slurm: a step of several tasks (`srun`). A port of its own for each job:
      10,000 to 39,999, by the number of the job and of the step.
    * Kubernetes: an indexed job (`completionMode: Indexed`) whose pods have
      `TFSCALE_NUM_WORKERS` set to its number of completions and
      `TFSCALE_SERVICE` to the name of its headless service; port 2222.

    Args:
        environ: Environment variables.

    Raises:
        ValueError: If what is set makes no cluster.

    Example:

    >>> cluster = cluster_from_environment(
    ...     {
    ...         "SLURM_JOB_ID": "7",
    ...         "SLURM_STEP_ID": "0",
    ...         "SLURM_PROCID": "2",
    ...         "SLURM_STEP_NUM_TASKS": "3",
    ...         "SLURM_STEP_NODELIST": "n[9-10]",
    ...         "SLURM_STEP_TASKS_PER_NODE": "2,1",
    ...     }
    ... )
    >>> cluster.jobs
    {'worker': ('n9:10112', 'n9:10113', 'n10:10112')}
    >>> cluster.address
    'n10:10112'
    """
    if environ.get("TF_CONFIG"):
        return Cluster.from_tf_config(environ["TF_CONFIG"])
    if _number(environ, "SLURM_STEP_NUM_TASKS", "1") > 1:
        return _slurm(environ)
    if "JOB_COMPLETION_INDEX" in environ and "TFSCALE_NUM_WORKERS" in environ:
        return _kubernetes(environ)
    return None


def _number(environ, name, default):
    text = environ.get(name, default)
    if not text.isdecimal():
        raise ValueError(
            f"The environment variable {name} must be a number. Received: "
            f"{text!r}. Correct it, or set TF_CONFIG, which takes precedence."
        )
    return int(text)


def _slurm(environ):
    def read(name):
        if name not in environ:
            raise ValueError(
                "Each task of a Slurm step must know its number. Received: "
                f"SLURM_STEP_NUM_TASKS without {name}. Start the program with "
                "`srun`, or set TF_CONFIG."
            )
        return environ[name]

    hosts = expand_hosts(read("SLURM_STEP_NODELIST"))
    counts = expand_counts(read("SLURM_STEP_TASKS_PER_NODE"))
    total = _number(environ, "SLURM_STEP_NUM_TASKS", "1")
    if len(hosts) != len(counts) or sum(counts) != total:
        raise ValueError(
            f"Slurm's hosts and tasks must agree. Received: hosts {hosts} with "
            f"{counts} tasks, of {total}."
        )
    # Tasks are taken to lie in blocks, as `srun` lays them by default.
    job = _number(environ, "SLURM_JOB_ID", "")
    step = _number(environ, "SLURM_STEP_ID", "0")
    first_port = 10_000 + 16 * ((job + step) % 1_875)
    addresses = [
        f"{host}:{first_port + task}"
        for host, count in zip(hosts, counts)
        for task in range(count)
    ]
    index = _number(environ, "SLURM_PROCID", "")
    here = environ.get("SLURMD_NODENAME")
    if here and addresses[index].rpartition(":")[0] != here:
        raise ValueError(
            "Slurm must distribute tasks in blocks, the first ones on the "
            f"first host. Received: task {index} on {here!r} instead of "
            f"{addresses[index]!r}. Use `srun --distribution=block`."
        )
    return Cluster({"worker": tuple(addresses)}, "worker", index)


def expand_hosts(text: str) -> list[str]:
    """The hosts of a Slurm list such as `gpu[08-10,12],login`, in its order.

    A name may have several ranges: `rack[1-2]n[1-4]`.
    """
    hosts: list[str] = []
    for host in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        pieces = re.split(r"\[([\d,-]+)\]", host)  # each second is a range
        numbers = map(_numbers_of, pieces[1::2])
        for found in itertools.product(*numbers):
            pieces[1::2] = found
            hosts.append("".join(pieces))
    return hosts


def _numbers_of(ranges):
    numbers = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        for number in range(int(first), int(last or first) + 1):
            numbers.append(f"{number:0{len(first)}}")
    return numbers


def expand_counts(text: str) -> list[int]:
    """The tasks of each host, of a Slurm list such as `2(x3),1`."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _kubernetes(environ):
    index = _number(environ, "JOB_COMPLETION_INDEX", "")
    count = _number(environ, "TFSCALE_NUM_WORKERS", "")
    host = environ.get("HOSTNAME", "")
    job, _, number = host.rpartition("-")
    service = environ.get("TFSCALE_SERVICE")
    if not service or number != str(index):
        raise ValueError(
            "Pods of an indexed job find each other by a headless service. "
            f"Received: HOSTNAME={host!r}, JOB_COMPLETION_INDEX={index}, "
            f"TFSCALE_SERVICE={service!r}. Give the job's pod template a "
            "`subdomain`, make a headless service of that name, and set "
            "TFSCALE_SERVICE to it."
        )
    addresses = tuple(
        f"{job}-{i}.{service}:{KUBERNETES_PORT}" for i in range(count)
    )
    return Cluster({"worker": addresses}, "worker", index)
