"""Starts a program in all processes of a cluster.

    python -m tfscale.launch --num_workers=2 train.py --its_own_flag=1
    python -m tfscale.launch --hosts=a:2222,b:2222 train.py     (on a and on b)
    srun python -m tfscale.launch train.py                      (Slurm)

The program joins the cluster by `tfscale.initialize()`, and runs unchanged
without the launcher.
"""

import contextlib
import itertools
import os
import socket
import sys

import tensorflow as tf
from absl import app
from absl import flags

from tfscale.cluster import Cluster
from tfscale.cluster import cluster_from_environment
from tfscale.cluster import preflight
from tfscale.cluster.initialize import versions
from tfscale.cluster.preflight import survivors
from tfscale.launch import output
from tfscale.launch.launcher import Launcher
from tfscale.launch.launcher import Task

NUM_WORKERS = flags.DEFINE_integer(
    "num_workers", None, "Workers on this machine.", lower_bound=1
)
MIN_WORKERS = flags.DEFINE_integer(
    "min_workers",
    None,
    "With --max_workers: a worker of this machine that fails is left out, and "
    "the others start again, as long as so many are left; "
    "tfscale.callbacks.ElasticWorkers may ask for so few. With --hosts: a host "
    "that is not there after --preflight_seconds is left out.",
    lower_bound=1,
)
MAX_WORKERS = flags.DEFINE_integer(
    "max_workers",
    None,
    "Workers on this machine at the most: to begin with, if there is no "
    "--num_workers, or that tfscale.callbacks.ElasticWorkers may ask for.",
    lower_bound=1,
)
NUM_PS = flags.DEFINE_integer(
    "num_ps",
    0,
    "Parameter servers on this machine, in addition to workers and a chief.",
    lower_bound=0,
)
DEVICES_PER_WORKER = flags.DEFINE_integer(
    "devices_per_worker",
    None,
    "GPUs of this machine for each worker, in turn, and none for a chief and "
    "parameter servers; where it has none, as many virtual CPU devices.",
    lower_bound=1,
)
HOSTS = flags.DEFINE_list(
    "hosts",
    None,
    "Addresses host:port of one worker each. The same command is started on "
    "each of the hosts.",
)
HOST_INDEX = flags.DEFINE_integer(
    "host_index",
    None,
    "Which of --hosts this is; found by name and address if left out.",
    lower_bound=0,
)
MAX_RESTARTS = flags.DEFINE_integer(
    "max_restarts", 0, "How often to start again.", lower_bound=0
)
GRACE = flags.DEFINE_float(
    "grace_seconds", 15.0, "From SIGTERM to SIGKILL.", lower_bound=0.0
)
PREFLIGHT = flags.DEFINE_float(
    "preflight_seconds",
    60.0,
    "How long to wait for other hosts. The missing ones are named after 3 s.",
    lower_bound=0.0,
)
MODULE = flags.DEFINE_boolean(
    "module",
    False,
    "The program is a module, as of `python -m`.",
    short_name="m",
)


def main(arguments):
    """Runs the launcher until all processes have ended."""
    program = arguments[1:]
    if not program:
        raise app.UsageError("Say which program to run, after the flags.")
    command = [sys.executable, *(["-m"] if MODULE.value else []), *program]
    _check_elastic()
    hosts = _cluster_of_several_machines()
    cluster = _met(hosts)
    held = contextlib.ExitStack()

    def find_lost():
        nonlocal cluster
        before, cluster = cluster, _met(hosts)
        gone = [a for a in before.addresses if a not in cluster.addresses]
        return ", ".join(gone)

    def make_tasks(local_ranks, group):
        if cluster is not None:
            return [_task(cluster, _rank_on_host(hosts))]
        environ = group.to_environ() if group else {}
        held.close()  # the ports of the attempt before
        return _local_tasks(local_ranks, NUM_PS.value, held, environ)

    if MAX_WORKERS.value:
        # If the last worker lacks GPUs, it is an error now and not when it
        # starts.
        _local_tasks([MAX_WORKERS.value - 1], num_ps=0, held=held)
    launcher = Launcher(
        command,
        make_tasks,
        max_restarts=MAX_RESTARTS.value,
        grace=GRACE.value,
        num_workers=NUM_WORKERS.value or MAX_WORKERS.value or 1,
        min_workers=MIN_WORKERS.value,
        max_workers=MAX_WORKERS.value,
        find_lost=find_lost if HOSTS.value and MIN_WORKERS.value else None,
    )
    sys.exit(launcher.run())


def _met(cluster):
    """The cluster of the hosts that answer: all of them, or --min_workers."""
    if cluster is None:
        return None
    options = {"timeout": PREFLIGHT.value, "say": output.say}
    try:
        if HOSTS.value and MIN_WORKERS.value:
            least = MIN_WORKERS.value
            return survivors(cluster, versions(), least=least, **options)
        preflight(cluster, versions(), **options)
    except (OSError, ValueError) as error:
        output.say(str(error))
        sys.exit(1)
    return cluster


def _check_elastic():
    least, most = MIN_WORKERS.value, MAX_WORKERS.value
    if least is None and most is None:
        return
    if HOSTS.value:
        if most is not None or least > len(HOSTS.value):
            raise app.UsageError(
                "With --hosts, --min_workers must be at most their number, "
                "and --max_workers must be omitted. Received: "
                f"--min_workers={least}, --max_workers={most}, "
                f"{len(HOSTS.value)} hosts."
            )
        return
    first = NUM_WORKERS.value
    if None in (least, most) or not least <= (first or least) <= most:
        raise app.UsageError(
            "--min_workers and --max_workers must be given together, the "
            "first at most the second, and --num_workers between them. "
            f"Received: --min_workers={least}, --max_workers={most}, "
            f"--num_workers={first}."
        )
    if NUM_PS.value:
        raise app.UsageError(
            "--min_workers and --max_workers are not for --num_ps. Received: "
            f"--num_ps={NUM_PS.value}. Remove it."
        )


def _cluster_of_several_machines():
    if HOSTS.value == []:
        raise app.UsageError(
            "--hosts must name the hosts, such as --hosts=a:2222,b:2222. "
            "Received: none."
        )
    if HOSTS.value:
        if NUM_WORKERS.value or NUM_PS.value:
            raise app.UsageError(
                "--hosts has one worker each: leave --num_workers and --num_ps "
                "out."
            )
        return _cluster_of_hosts(tuple(HOSTS.value))
    if NUM_WORKERS.value or NUM_PS.value or MAX_WORKERS.value:
        return None
    try:
        return cluster_from_environment()
    except ValueError as error:
        raise app.UsageError(str(error)) from None


def _cluster_of_hosts(hosts):
    jobs = {"worker": hosts}
    try:
        Cluster(jobs, "worker", 0)  # Explains what is wrong with an address.
        index = HOST_INDEX.value
        if index is None:
            index = _index_of_this_host(hosts)
        return Cluster(jobs, "worker", index)
    except ValueError as error:
        raise app.UsageError(f"--hosts={','.join(hosts)}: {error}") from None


def _index_of_this_host(addresses):
    """The index of the one address whose host is this machine."""
    names = {"localhost", socket.gethostname(), socket.getfqdn()}
    hosts = [address.rpartition(":")[0] for address in addresses]
    found = [
        index
        for index, host in enumerate(hosts)
        if host in names or _is_local_address(host)
    ]
    if len(found) != 1:
        raise app.UsageError(
            "One of --hosts must be this machine. Received: "
            f"{','.join(addresses)}; this is {socket.gethostname()}, which "
            f"fits {len(found)} of them. Pass --host_index."
        )
    return found[0]


def _is_local_address(host):
    """Whether a socket can be bound to it: only to an address of this host."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
        for family, kind, _, _, address in found:
            with (
                contextlib.suppress(OSError),
                socket.socket(family, kind) as one,
            ):
                one.bind(address)
                return True
    return False


def _local_tasks(local_ranks, num_ps, held, environ=None):
    jobs = {"worker": len(local_ranks)}
    if num_ps:
        jobs = {"chief": 1, **jobs, "ps": num_ps}
    ports = iter(_free_ports(sum(jobs.values()), held))
    addresses = {
        job: tuple(f"localhost:{next(ports)}" for _ in range(count))
        for job, count in jobs.items()
    }
    return [
        _task(
            Cluster(addresses, job, index),
            local_ranks[index] if job == "worker" else index,
            environ,
        )
        for job, count in jobs.items()
        for index in range(count)
    ]


def _rank_on_host(cluster):
    """Which share of the GPUs of its host a process of a cluster has."""
    count = DEVICES_PER_WORKER.value
    if not count or len(tf.config.list_physical_devices("GPU")) == count:
        return 0  # Slurm may show each task its own GPUs only.
    has_servers = "ps" in cluster.jobs
    sharing = cluster.jobs["worker"] if has_servers else cluster.addresses
    host = cluster.address.rpartition(":")[0]
    before = itertools.takewhile(cluster.address.__ne__, sharing)
    return sum(address.rpartition(":")[0] == host for address in before)


def _task(cluster, local_rank, environ=None):
    environ = {
        **os.environ,
        **(environ or {}),
        "PYTHONUNBUFFERED": "1",
        "TF_CONFIG": cluster.to_tf_config(),
    }
    count = DEVICES_PER_WORKER.value
    gpus = tf.config.list_physical_devices("GPU") if count else []
    if gpus and "ps" in cluster.jobs and cluster.job != "worker":
        # TensorFlow would take the memory of those of the workers.
        environ["CUDA_VISIBLE_DEVICES"] = "-1"
    elif count and cluster.job != "ps":
        if not gpus:
            environ["TFSCALE_VIRTUAL_DEVICES"] = str(count)
        elif (local_rank + 1) * count > len(gpus):
            raise app.UsageError(
                "Each worker needs its own GPUs. Received: "
                f"--devices_per_worker={count} for worker {local_rank}, on a "
                f"machine of {len(gpus)} GPUs."
            )
        else:
            names = [str(index) for index in range(len(gpus))]
            if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
                names = visible.split(",")
            of_task = names[local_rank * count : (local_rank + 1) * count]
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(of_task)
    return Task(cluster.job, cluster.index, environ, local_rank)


def _free_ports(count, held):
    """Ports that nobody else is given before `held` is closed.

    A program listens seconds after this. It can, with `SO_REUSEADDR`, as gRPC.
    """
    try:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("", 0))
    except OSError as error:
        output.say(
            "Each process needs a free port of this machine. Received: "
            f"none for one of {count} processes ({error.strerror}). End "
            "programs that use ports, start fewer processes, or widen "
            "net.ipv4.ip_local_port_range."
        )
        sys.exit(1)
    return [one.getsockname()[1] for one in sockets]


if __name__ == "__main__":
    # Flags after the program are the program's.
    flags.FLAGS.set_gnu_getopt(False)
    app.run(main)
