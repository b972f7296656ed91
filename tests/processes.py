"""`pytest --processes=N`: each file of tests in a forked process, N at a time.

    pytest ── imports TensorFlow and all tests, starts nothing
      ├─ fork ─► tests/mesh_test.py           ends with the file
      ├─ fork ─► tests/pipeline/fit_test.py
      └─ fork ─► the doctests of tfscale/data ...

TensorFlow keeps what it compiled for as long as a process lives, and the larger
a process, the longer each search for garbage: one for all files grew to 7 GB. A
fork costs milliseconds, and is safe as long as TensorFlow has not started; no
file starts it when it is imported (`conftest.py`). A file finds nothing of
those before it, so what passes alone passes here.

A process that becomes larger than `MAX_BYTES` fails the last of its tests. A
test that takes longer than `MAX_SECONDS` is killed and fails, and whatever the
tests started and left behind is killed at the end: nothing hangs. With
`--within=S` no file begins after S seconds, and the summary names those left.
"""

import ctypes
import gc
import math
import multiprocessing
import os
import resource
import signal
import time
from multiprocessing import connection

import pytest

from tests import forked_python

# The dearest files begin first: none is left alone in the end, with one core,
# while the others have nothing to do. Those that mostly wait are between them,
# apart from each other, or no core would work while they do.
_FIRST = (
    "tests/mesh/workers_test.py",
    "tests/backup/kill_matrix_test.py",
    "tests/launch/launch_test.py",
    "tests/variables/fully_sharded_test.py",
    "tests/readme_test.py",
    "tests/data/explaining/explain_test.py",
    "tests/step/every_layer_test.py",
    "tests/tensor_parallel/sequence_parallel/sequence_test.py",
    "tests/callbacks/throughput_test.py",
    "tests/tensor_parallel/models_test.py",
    "tests/backup/workers_test.py",
    "tests/parameter_server/two_workers_test.py",
    "tests/accumulation/gradient_accumulation_test.py",
    "tests/mesh/remote_test.py",
    "tests/cluster/preflight_test.py",
    "tests/variables/zero_memory_test.py",
    "tests/pipeline/fit_test.py",
    "tests/cluster/lost_worker_test.py",
    "tests/examples/train_gpt_test.py",
    "tests/cluster/reception_test.py",
    "tests/examples/finetune_causal_lm_test.py",
    "tests/mesh/models/loading_test.py",
    "tests/tensor_parallel/int8_test.py",
    "tests/variables/zero_test.py",
    "tests/cluster/failure_detector_test.py",
)
MAX_BYTES = 2.5 * 2**30
MAX_SECONDS = 600.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Bytes at the most, and seconds of processors, also of children: by file.
_USED = pytest.StashKey[dict]()
# The groups of tests that were not begun in time.
_LEFT = pytest.StashKey[list]()


def pytest_addoption(parser):
    parser.addoption(
        "--processes",
        type=_number,
        default=0,
        help="Each file in a forked process, so many at a time. 0: all in "
        "this one. auto: one for each core and one more, as some wait.",
    )
    parser.addoption(
        "--within",
        type=float,
        default=math.inf,
        help="With --processes: the seconds after which no file begins. Those "
        "that are left are named, and do not fail.",
    )
    parser.addoption(
        "--exhaustive",
        nargs="?",
        const="all",
        choices=("all", "others"),
        help="All cases of crossings of features (the marker `crossing`), or "
        "only those that do not run without it.",
    )


def _number(text):
    return len(os.sched_getaffinity(0)) + 1 if text == "auto" else int(text)


def pytest_runtestloop(session):
    """Takes the place of pytest's own loop if processes are asked for."""
    options = session.config.option
    if not options.processes or options.collectonly or session.testsfailed:
        return None
    session.config.stash[_USED] = {}
    session.config.stash[_LEFT] = []
    begin, waiting, running = time.monotonic(), _groups(session.items), []
    # What a test leaves behind becomes a child of this process.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        while waiting or running:
            if time.monotonic() - begin > options.within:
                session.config.stash[_LEFT] += waiting
                waiting = []
            while waiting and len(running) < options.processes:
                running.append(_Process(session, waiting.pop(0)))
            connection.wait(
                [w for process in running for w in process.waitables], 5.0
            )
            for process in list(running):
                if process.has_ended():
                    running.remove(process)
                    if process.items:
                        waiting.insert(0, process.items)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    finally:
        for process in running:
            process.kill()
        _kill_children()
    return True


def _kill_children():
    """Kills all that tests left behind, and what that leaves behind."""
    path = f"/proc/self/task/{os.getpid()}/children"
    while True:
        with open(path) as file:
            children = file.read().split()
        if not children:
            return
        for child in map(int, children):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def pytest_terminal_summary(terminalreporter, config):
    used = config.stash.get(_USED, None)
    if not used:
        return
    write = terminalreporter.write_line
    if config.option.durations:
        for file in sorted(used, key=lambda file: used[file][1]):
            write(f"{used[file][1]:6.1f} s of processors: {file}")
    group = max(used, key=lambda file: used[file][0])
    write(
        f"{len(used)} processes, {sum(s for _, s in used.values()):.0f} s of "
        f"processors, the largest {used[group][0] / 2**30:.2f} GB: {group}"
    )
    if left := config.stash[_LEFT]:
        write(
            f"Not begun within {config.option.within:.0f} s: "
            f"{sum(map(len, left))} tests of {len(left)} files, "
            f"{', '.join(_file(items[0]) for items in left)}"
        )


def _groups(items):
    """Tests of a file, or doctests of a folder of the package."""
    groups = {}
    for item in items:
        file = _file(item)
        if file.startswith("tfscale/"):
            file = "/".join(file.split("/")[:2])
        groups.setdefault(file, []).append(item)
    first = {file: rank for rank, file in enumerate(_FIRST)}
    for file in first:
        if not os.path.exists(os.path.join(items[0].config.rootpath, file)):
            raise pytest.UsageError(f"{file} is no more: see `_FIRST`.")
    return [groups[f] for f in sorted(groups, key=lambda f: first.get(f, 99))]


def _file(item):
    return item.nodeid.partition("::")[0]


class _Process:
    """A fork that runs some tests, and what it says of them.

    Attributes:
        items: What is still to be run when it has ended.
        waitables: Of which one is ready when there is something to do.
    """

    def __init__(self, session, items):
        self._session = session
        self._running = None
        self._started = time.monotonic()
        self.items = items
        self._connection, theirs = multiprocessing.Pipe(duplex=False)
        gc.freeze()
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            _run(session, items, theirs, parent)
        theirs.close()
        # Not the end of the pipe, which what the fork started may hold open.
        self._end = os.pidfd_open(self._pid)
        self.waitables = [self._connection, self._end]

    def has_ended(self):
        """Takes what it has said; kills it if a test takes too long."""
        died = connection.wait([self._end], 0)
        try:
            while self._connection.poll():
                if self._takes_the_last(*self._connection.recv()):
                    return True
        except EOFError:
            died = True
        seconds = time.monotonic() - self._started
        if seconds > MAX_SECONDS and not died:
            # pytest's fault handler prints where each thread is.
            os.kill(self._pid, signal.SIGABRT)
            if not connection.wait([self._end], 10.0):
                os.kill(self._pid, signal.SIGKILL)
            self._lost(f"It took longer than {MAX_SECONDS:.0f} s")
        elif died:
            self._lost("The process of this test died")
        return seconds > MAX_SECONDS or died

    def _takes_the_last(self, kind, message):
        hook = self._session.config.hook
        if kind == "start":
            self._running = self.items[message]
            self._started = time.monotonic()
            hook.pytest_runtest_logstart(
                nodeid=self._running.nodeid, location=self._running.location
            )
        elif kind == "report":
            hook.pytest_runtest_logreport(
                report=hook.pytest_report_from_serializable(
                    config=self._session.config, data=message
                )
            )
        elif kind == "finish":
            hook.pytest_runtest_logfinish(
                nodeid=self._running.nodeid, location=self._running.location
            )
            self._running = None
        else:
            self.items = []
            usage = os.wait4(self._pid, 0)[2]
            self._session.config.stash[_USED][message[0]] = (
                message[1],
                usage.ru_utime + usage.ru_stime + message[2],
            )
            self._close()
            return True
        return False

    def _lost(self, reason):
        """That is a failure of its test, the others go on."""
        _, status = os.waitpid(self._pid, 0)
        self._close()
        item = self._running or self.items[0]
        self._session.config.hook.pytest_runtest_logreport(
            report=pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords={},
                outcome="failed",
                longrepr=f"{reason}: {os.waitstatus_to_exitcode(status)}.",
                when="call",
            )
        )
        self.items = self.items[self.items.index(item) + 1 :]

    def _close(self):
        self._connection.close()
        os.close(self._end)

    def kill(self):
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._close()


class _Reports:
    """A plugin of the fork: hands over what pytest says of its tests."""

    def __init__(self, config, items, pipe):
        self._config = config
        self._indices = {item.nodeid: i for i, item in enumerate(items)}
        self._pipe = pipe

    def pytest_runtest_logstart(self, nodeid):
        self._pipe.send(("start", self._indices[nodeid]))

    def pytest_runtest_logreport(self, report):
        data = self._config.hook.pytest_report_to_serializable(
            config=self._config, report=report
        )
        self._pipe.send(("report", data))

    def pytest_runtest_logfinish(self):
        self._pipe.send(("finish", None))


def _run(session, items, pipe, parent):
    """What a fork does, which never returns."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        forked_python.count_seconds()
        config = session.config
        plugins = config.pluginmanager
        plugins.unregister(name="terminalreporter")
        # A file of its own for what tests print.
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        plugins.register(_Reports(config, items, pipe))
        for item, following in zip(items, [*items[1:], None], strict=True):
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if peak > MAX_BYTES:
            config.hook.pytest_runtest_logreport(
                report=pytest.TestReport(
                    nodeid=item.nodeid,
                    location=item.location,
                    keywords={},
                    outcome="failed",
                    longrepr=f"The process became {peak / 2**30:.1f} GB large "
                    f"with this file, more than {MAX_BYTES / 2**30} GB.",
                    when="teardown",
                )
            )
        file = _file(item)
        pipe.send(("end", (file, peak, forked_python.seconds_used())))
        os._exit(0)
    finally:
        os._exit(1)
