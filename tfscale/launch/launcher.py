"""Runs the processes of a cluster as one: all end well, or all are ended.

    start ──► all exit with 0 ──────────────────────────────► 0
      ▲   ──► one fails ──► report it, end the others ──► its exit code
      ├────── without it, or without the hosts that are lost ────┤
      ├────── --max_restarts, after a pause ─────────────────────┘
      └── all exit and ask for another number of workers (cluster/elastic.py)
      SIGTERM, SIGINT: passed on; processes that outlive the grace are killed
      SIGHUP: passed on as SIGTERM

With parameter servers a worker that fails is restarted alone. The program is
over when its chief is; workers and servers, which never exit, are ended then.
"""

import dataclasses
import signal
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

from tfscale.cluster.elastic import ElasticGroup
from tfscale.launch import output
from tfscale.launch.child import Child
from tfscale.launch.warden import Warden

_POLLING_SECONDS = 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """A process to be started."""

    job: str  # "worker", "chief" or "ps"
    index: int  # in its job
    environ: Mapping[str, str]  # all of it
    # Number of its share of the machine, such as its GPUs, which stays the same
    # if others are left out.
    local_rank: int = 0

    @property
    def name(self) -> str:
        """How its lines and reports begin."""
        return f"{self.job} {self.index}"


@dataclasses.dataclass(eq=False)
class Launcher:
    """Starts tasks, watches them and ends them."""

    command: Sequence[str]  # program and arguments, the same for all
    # Called before each start, with the local ranks of the workers and, if
    # their number may change, what they are told of it: so each attempt can
    # have ports of its own.
    make_tasks: Callable[[Sequence[int], ElasticGroup | None], Sequence[Task]]
    _: dataclasses.KW_ONLY
    num_workers: int = 1  # of this machine, to begin with
    # How often a failure is followed by another start: of all tasks or, with
    # parameter servers, of the worker that failed.
    max_restarts: int = 0
    grace: float = 15.0  # seconds between SIGTERM and SIGKILL
    # Seconds before the first restart; each pause is twice as long as the one
    # before, 60 s at most.
    first_pause: float = 1.0
    # Below so many a worker that fails is not left out; None if it never is.
    min_workers: int | None = None
    # Workers may ask for so many; None if their number does not change so.
    max_workers: int | None = None
    # Called after a failure where workers are on other hosts too; names those
    # of them that were lost since, and are not waited for.
    find_lost: Callable[[], str] | None = None

    def __post_init__(self):
        self._ranks = list(range(self.num_workers))
        self._lost = []  # local ranks of workers that failed
        self._planned = self.num_workers
        self._num_restarts = 0
        self._signal = None
        self._children = {}
        self._due = {}  # when tasks are to start again that did so alone

    def run(self) -> int:
        """Runs to the end, and returns the exit code of the launcher.

        It is 0, that of the first process that failed, or 128 plus the signal
        that ended it.
        """
        handlers = {
            number: signal.signal(number, self._note_signal)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            # Set by `nohup`, say.
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        self._warden = Warden()
        try:
            code = self._run_once()
            while code and not self._signal and self._may_restart(code):
                code = self._run_once()
            return 128 + self._signal if self._signal else code
        finally:
            self._end_all()
            self._warden.end()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _note_signal(self, number, frame):
        self._signal = number

    @property
    def _group(self):
        if self.max_workers is None:
            return None
        sizes = len(self._ranks), self._planned
        return ElasticGroup(self.min_workers, self.max_workers, *sizes)

    def _asked_for(self, code):
        """The number of workers that an exit code asks for, or None."""
        return self._group and self._group.count_of(code)

    def _may_restart(self, code):
        """Whether those that are left start again; after a pause."""
        count = self._asked_for(code)
        if count is not None:
            workers = "1 worker" if count == 1 else f"{count} workers"
            output.say(f"starting again with {workers}, as the program asks")
            others = set(range(self.max_workers)) - {*self._lost}
            self._ranks = sorted([*sorted(others), *self._lost][:count])
            self._lost = [r for r in self._lost if r not in self._ranks]
            self._planned = count
            return True
        pause = self.first_pause
        lost = self.find_lost and self.find_lost()
        if lost:
            output.say(f"starting again in {pause:g} s without {lost}")
        elif (
            self.find_lost is None
            and self.min_workers
            and len(self._ranks) > self.min_workers
        ):
            self._ranks.remove(self._first.local_rank)
            self._lost.append(self._first.local_rank)
            output.say(
                f"starting again in {pause:g} s without {self._first.name}: "
                f"{len(self._ranks)} workers, {self.min_workers} at least"
            )
        else:
            pause = self._next_pause()
        end = time.monotonic() + (pause or 0.0)
        while time.monotonic() < end and not self._signal:
            time.sleep(_POLLING_SECONDS)
        return pause is not None and not self._signal

    def _next_pause(self):
        """Seconds before another start, which is logged; None without one."""
        if self._num_restarts >= self.max_restarts:
            return None
        # More than 1023 doublings are no float.
        pause = min(self.first_pause * 2 ** min(self._num_restarts, 99), 60.0)
        self._num_restarts += 1
        output.say(
            f"starting again in {pause:g} s, number {self._num_restarts} of at "
            f"most {self.max_restarts} restarts"
        )
        return pause

    def _run_once(self):
        """The exit code of an attempt; None if a signal ended it."""
        tasks = self.make_tasks(self._ranks, self._group)
        self._due = {}
        for task in tasks:  # one by one: those that run can be ended
            self._start(task)
        has_servers = any(task.job == "ps" for task in tasks)
        while not self._signal:
            code = self._look_by_one() if has_servers else self._look()
            if code is not None:
                self._end_all()
                return code
            time.sleep(_POLLING_SECONDS)
        # Programs save and end on SIGTERM, and SIGHUP would kill them.
        is_hangup = self._signal == signal.SIGHUP
        number = signal.SIGTERM if is_hangup else self._signal
        output.say(
            f"received {signal.Signals(self._signal).name}, passing "
            f"{'SIGTERM' if is_hangup else 'it'} on"
        )
        self._end_all(number)
        return None

    def _start(self, task):
        self._children[task] = Child(
            task.name, self.command, task.environ, self._warden
        )

    def _look(self):
        """The exit code if all have ended well, or one has not."""
        codes = {t: child.exit_code for t, child in self._children.items()}
        failed = [task for task, code in codes.items() if code]
        if failed:
            first = min(failed, key=lambda t: self._children[t].ended_at)
            if self._asked_for(codes[first]) is None:
                self._report(first, codes[first])
            elif None in codes.values():
                # All have saved, and end by themselves.
                end = self._children[first].ended_at + self.grace
                if time.monotonic() < end:
                    return None
            self._first = first
            return _as_exit_code(codes[first])
        return None if None in codes.values() else 0

    def _look_by_one(self):
        """The exit code with parameter servers: each process fails alone."""
        now = time.monotonic()
        for task in [t for t, at in self._due.items() if at <= now]:
            del self._due[task]
            self._start(task)
        for task, child in list(self._children.items()):
            code = child.exit_code
            if code is None:
                continue
            if task.job == "chief" and code == 0:
                return 0
            if code:
                self._report(task, code)
                if task.job != "worker":
                    return _as_exit_code(code)
            child.kill()  # and its process group
            del self._children[task]
            pause = self._next_pause() if code else None
            others = (*self._children, *self._due)
            if pause is not None:
                self._due[task] = now + pause
            elif code and any(t.job == "worker" for t in others):
                output.say(f"going on without {task.name}")
            elif code:
                output.say("no worker is left")
                return _as_exit_code(code)
        # Without the chief on this machine, a server that ends has ended well.
        return None if self._children or self._due else 0

    def _report(self, task, code):
        child = self._children[task]
        child.wait_for_output()
        how = f"exited with {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        lines = "".join(f"\n    {line}" for line in child.last_lines)
        output.say(f"{task.name} {how}, as the first. Its last lines:{lines}")

    def _end_all(self, number=signal.SIGTERM):
        """Ends all processes: a signal, a grace, SIGKILL."""
        children = self._children.values()
        if self._running() and not self._signal:
            names = ", ".join(child.name for child in self._running())
            output.say(f"ending the others: {names}")
        for child in children:
            if child.exit_code is None:
                child.send(number)
        end = time.monotonic() + self.grace
        while time.monotonic() < end and self._running():
            time.sleep(_POLLING_SECONDS)
        for child in self._running():
            output.say(f"{child.name} is there after {self.grace:g} s: killed")
        for child in children:
            child.kill()
            child.wait_for_output()
        self._children = {}

    def _running(self):
        return [c for c in self._children.values() if c.exit_code is None]


def _as_exit_code(code):
    """As in a shell: 128 plus the signal that killed a process."""
    return 128 - code if code < 0 else code
