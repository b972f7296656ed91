"""Real processes of a cluster, which import TensorFlow no more.

    the test ──► python -m tests.forked_cluster, by forked_python.py
                   ├─► chief 0    the program, with a TF_CONFIG of its own
                   ├─► worker 0   likewise ...
                   └─► ...
             ◄── how each one ended

A fork is safe as long as TensorFlow has not started. All of them die with the
test, whatever happens to it.
"""

import atexit
import functools
import json
import os
import runpy
import signal
import sys
import tempfile
import time

from tests import forked_processes
from tests import forked_python
from tests import source_files


def run(module, jobs, folder, spares=(), timeout=120.0):
    """Runs a module in all tasks of a cluster until its chief has ended.

    Args:
        module: Name of a module, run as `__main__` with `folder` as its only
            argument.
        jobs: Number of tasks by job, of which the first is the chief's.
        folder: Where `chief0.log` and its like are written, and what the
            module says of itself.
        spares: Tasks such as `("worker", 1)` that are there twice: the second
            one begins as soon as there is a file `folder/worker1.spare`.
        timeout: Seconds for all.

    Returns:
        The exit code of each, by name.
    """
    addresses = iter(forked_processes.free_addresses(sum(jobs.values())))
    cluster = {
        job: [next(addresses) for _ in range(count)]
        for job, count in jobs.items()
    }
    tasks = [
        [job, index, False] for job, count in jobs.items()
        for index in range(count)
    ] + [[job, index, True] for job, index in spares]  # fmt: skip
    process = forked_python.run(
        ["-m", "tests.forked_cluster"],
        input=json.dumps([module, cluster, tasks, folder, timeout]),
        cwd=source_files.REPOSITORY,
        env={
            **os.environ,
            "PYTHONPATH": source_files.REPOSITORY,
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        timeout=timeout + 60.0,
    )
    if process.returncode:
        raise RuntimeError(process.stdout + process.stderr)
    return json.loads(process.stdout.splitlines()[-1])


def results(module, jobs, spares=()):
    """Runs a module likewise, which writes `folder/results.json`.

    Returns:
        The exit codes, and what is in that file.
    """
    with tempfile.TemporaryDirectory() as folder:
        codes = run(module, jobs, folder, spares)
        path = os.path.join(folder, "results.json")
        if codes["chief0"] or not os.path.exists(path):
            with open(os.path.join(folder, "chief0.log")) as log:
                raise RuntimeError(f"{codes} {log.read()}")
        with open(path) as file:
            return codes, json.load(file)


def _main():
    forked_processes.die_with(os.getppid())
    module, cluster, tasks, folder, timeout = json.load(sys.stdin)
    children = {}
    for job, index, is_spare in tasks:
        name = f"{job}{index}"
        log = os.path.join(folder, f"{name}{'_again' * is_spare}.log")
        pid = forked_processes.fork(
            functools.partial(
                _become, module, cluster, job, index, is_spare, folder, log
            )
        )
        children[pid] = f"{name}{'_again' * is_spare}"
    print(json.dumps(_wait(children, timeout)), flush=True)


def _become(module, cluster, job, index, is_spare, folder, log):
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    name = os.path.join(folder, f"{job}{index}")
    task = {"type": job, "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    while is_spare and not os.path.exists(f"{name}.spare"):
        time.sleep(0.05)
    with open(f"{name}.pid", "w") as pid_file:
        pid_file.write(str(os.getpid()))
    sys.argv = [module, folder]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:
        forked_processes.say_error()  # before what follows
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()  # as at the end of a program


def _wait(children, timeout):
    """Until the chief, the first, has ended; the others have 30 s more."""
    chief = next(iter(children))
    codes = {}
    end = time.monotonic() + timeout
    while len(codes) < len(children) and time.monotonic() < end:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.02)
            continue
        codes[children[pid]] = os.waitstatus_to_exitcode(status)
        if pid == chief:
            end = min(end, time.monotonic() + 30.0)
    for pid, name in children.items():
        if name not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            codes[name] = "had to be killed"
    return codes


if __name__ == "__main__":
    _main()
