"""Where the processes of a cluster meet, and hear when one of them ends.

TensorFlow waits without a word for a host that is not there. Here each process
listens at its own address and calls every other one, before TensorFlow starts:

        a:2222                    b:2222
    listens, calls b  ──facts──►  answers with its own facts
    "heard"           ─────────►
    answers           ◄──facts──  listens, calls a

A process is done once it has reached all and all have reached it, so none
leaves before all have called it. The ports are then free for TensorFlow's own
servers. A caller must be the process that answers at the address it gives: each
process sends its random word both ways.

The calls of the first process stay open. When a process ends, the kernel closes
its connections; when a machine is gone, the kernel of the other side asks a few
times (TCP's keep alive) and gives up. Neither needs a thread with deadlines:

    first process                 another process
                  ◄─────────────── "ready", once TensorFlow has the port
        ...                            ...
    "end", as its program ends ──► exits, as soon as the connection is closed
    "failed ValueError: ..." ────► exits with an error that says so
    closed without a word ───────► the first one was killed: an error too
    names it, or calls again  ◄─── closed: that process is lost

Parameter servers and their workers only wait for the call of their chief: they
may come later, and be started again, when TensorFlow has the chief's port.
"""

import concurrent.futures
import contextlib
import functools
import json
import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

from tfscale import forks
from tfscale.cluster import ports
from tfscale.cluster import reception
from tfscale.cluster.cluster import Cluster
from tfscale.cluster.reception import Reception

# Seconds after which a machine that is gone is noticed, and of its keep alive.
_SILENCE, _IDLE, _BETWEEN = 10, 4, 2
_SECONDS_BETWEEN_CALLS = 0.2
# A process that was reached is not called again.
_SECONDS_TO_HEAR = 60.0
_SECONDS_TO_SPEAK = 2.0
# For the port of a process that was killed, and is started again.
_SECONDS_FOR_THE_PORT = 5.0
_SECONDS_TO_COME_BACK = 10.0
_POLLING_SECONDS = 0.02
# Per address: a process calls once, and may have been restarted.
_MAX_CALLS = 256
_WORD_LENGTH = 32


class MissingError(ConnectionError):
    """Processes of a cluster are missing."""

    def __init__(self, text: str, addresses: Iterable[str]):
        super().__init__(text)
        self.addresses = list(addresses)


class Rendezvous:
    """One process where all of a cluster meet.

    Args:
        cluster: The cluster.
        facts: See `preflight`.
        about: See `preflight`.
        called: The addresses that this process calls; by default all others.
        callers: The addresses that call it; by default all others.
        silence: Seconds after which a machine that is silent is lost.

    Attributes:
        connections: Connections that stay open after `meet`, by address.
    """

    def __init__(
        self,
        cluster: Cluster,
        facts: Mapping[str, str],
        *,
        about: str = "",
        called: Collection[str] | None = None,
        callers: Collection[str] | None = None,
        silence: int = _SILENCE,
    ):
        others = [a for a in cluster.addresses if a != cluster.address]
        called = others if called is None else called
        callers = others if callers is None else callers
        self.connections: dict[str, socket.socket] = {}
        self._address = cluster.address
        self._about = about
        jobs = json.dumps(dict(cluster.jobs), sort_keys=True)
        self._facts = {**facts, "addresses, in the same order": jobs}
        self._silence = silence
        self._word = secrets.token_hex(_WORD_LENGTH // 2)
        # Members' messages have about the same size.
        self._max_bytes = max(
            reception.MAX_LINE_BYTES, 2 * len(self._message())
        )
        # Of those called: why one was not reached, its answer, the connection.
        self._unreached = dict.fromkeys(called, "not tried yet")
        self._found: dict[str, dict[str, Any]] = {}
        self._outgoing: dict[str, socket.socket] = {}
        # Of callers that gave an address: by their words.
        self._calls: dict[str, dict[str, socket.socket]] = {
            address: {} for address in callers
        }
        self._strange: str | None = None
        self._is_here: list[str] = []  # addresses at which this one answers
        self._is_over = threading.Event()
        # Of those that stay connected.
        self._ready: set[str] = set()
        self._lost_at: dict[str, float] = {}
        self._last_words = ""
        self._lock = threading.Lock()

    # --- meeting ------------------------------------------------------------

    def meet(
        self,
        timeout: float,
        *,
        patience: float = 3.0,
        say: Callable[[str], None] = logging.warning,
        first: str | None = None,
    ) -> None:
        """Returns once all processes have reached each other.

        Calls of the process at the address `first` stay open. For the other
        arguments and the errors see `preflight`.
        """
        is_calling = bool(self._unreached)
        try:
            with contextlib.ExitStack() as stack:
                if self._calls:
                    patient = 0.0 if is_calling else _SECONDS_FOR_THE_PORT
                    listener = ports.listen(self._address, patient)
                    stack.enter_context(Reception(listener, self._greet))
                if is_calling:
                    threads = concurrent.futures.ThreadPoolExecutor(
                        len(self._unreached)
                    )
                    stack.enter_context(threads)
                    stack.callback(self._is_over.set)
                    threads.map(self._call, self._unreached)
                self._wait(timeout, patience, say)
                self._compare()
            self._keep(first)
        except BaseException as error:
            if first == self._address:  # those that have met it wait for it
                self.connections = self._outgoing
                self.end(error)
            raise
        finally:
            self._close()

    def _wait(self, timeout, patience, say):
        start = time.monotonic()
        is_logged = False
        while missing := self._missing():
            if self._is_here:
                raise ValueError(
                    "Each process of a cluster must have its own address. "
                    f"Received: {self._address!r} and {self._is_here[0]!r}, "
                    "which are one process. Give each process of a machine "
                    "another port."
                )
            waited = time.monotonic() - start
            reasons = "; ".join(f"{a} ({why})" for a, why in missing.items())
            if waited > timeout:
                stranger = ""
                if self._strange is not None:
                    stranger = (
                        f" {self._strange!r} has called, but is none of these "
                        "addresses."
                    )
                raise MissingError(
                    "All processes of a cluster must be running. Received: "
                    f"after {timeout:g} s, at {self._address}, still missing: "
                    f"{reasons}.{stranger} Start them, or correct the "
                    "addresses; see their output.",
                    missing,
                )
            if waited > patience and not is_logged:
                is_logged = True
                say(f"Waiting for {reasons}.")
            time.sleep(_POLLING_SECONDS)

    def _greet(self, connection):
        """Answers a caller; returns what counts it, if it is expected."""
        caller = self._read(connection)
        if caller["about"] != self._about:
            return None
        calls = self._calls.get(caller["address"])
        if calls is None and caller["word"] != self._word:
            self._strange = caller["address"][:100]
            return None
        connection.settimeout(_SECONDS_TO_SPEAK)
        connection.sendall(self._message())
        if calls is None:
            return None  # It is this process, by another of its names.
        # A call counts once the caller has received the answer.
        heard = reception.read_line(connection, _SECONDS_TO_HEAR)
        if heard != "heard" or len(calls) == _MAX_CALLS:
            return None
        return functools.partial(_replace, calls, caller["word"], connection)

    def _read(self, connection):
        """The message of a member; raises `ValueError` if it is none."""
        text = reception.read_line(
            connection,
            _SECONDS_TO_SPEAK,
            beginning=b"{",
            max_bytes=self._max_bytes,
        )
        if not text:
            raise ConnectionError("it does not answer")
        try:
            message = json.loads(text)
        except RecursionError:
            message = None
        if not (
            isinstance(message, dict)
            and isinstance(message.get("facts"), dict)
            and all(
                isinstance(message.get(name), str)
                for name in ("address", "about", "word")
            )
            and len(message["word"]) == _WORD_LENGTH
        ):
            raise ValueError("Not what a process of a cluster says.")
        return message

    def _call(self, address):
        num_answered = None  # its calls, when it last answered one from here
        while not (self._is_over.is_set() or self._is_met(address)):
            # Called again only if another process calls with its address: it
            # may have been restarted.
            num_calls = len(self._calls.get(address, ()))
            if num_calls != num_answered:
                reason = self._call_once(address)
                if reason is None:
                    num_answered = num_calls
                else:
                    self._unreached[address] = reason
            self._is_over.wait(_SECONDS_BETWEEN_CALLS)

    def _call_once(self, address):
        """None if a process answers at an address, and else why not."""
        with contextlib.ExitStack() as stack:
            try:
                connection = stack.enter_context(ports.connect(address))
                connection.sendall(self._message())
                answer = self._read(connection)
                if answer["about"] != self._about:
                    return "something else listens at its port"
                if answer["address"] != address:
                    if answer["word"] == self._word:
                        self._is_here.append(address)
                    return f"{answer['address']} answers there"
                connection.sendall(b"heard\n")
            except (OSError, ValueError) as error:
                return ports.reason(error)
            stack.pop_all()
        _replace(self._outgoing, address, connection)
        self._found[address] = answer
        return None

    def _message(self):
        text = {"address": self._address, "facts": self._facts}
        text |= {"about": self._about, "word": self._word}
        return json.dumps(text).encode() + b"\n"

    def _is_met(self, address):
        found, calls = self._found.get(address), self._calls.get(address)
        if address not in self._unreached:
            return bool(calls)
        return found is not None and (calls is None or found["word"] in calls)

    def _missing(self):
        """Addresses, and why each is missing."""
        return {
            address: (
                self._unreached[address]
                if address in self._unreached and address not in self._found
                else "it did not call"
            )
            for address in sorted({*self._unreached, *self._calls})
            if not self._is_met(address)
        }

    def _compare(self):
        for address, found in sorted(self._found.items()):
            facts = found["facts"]
            for name in sorted({*facts, *self._facts}):
                here, there = self._facts.get(name), facts.get(name)
                if here != there:
                    raise ValueError(
                        "All processes of a cluster must have the same "
                        f"{name}. Received: {here} at {self._address}, "
                        f"{there} at {address}."
                    )

    def _keep(self, first):
        if first == self._address:
            self.connections, self._outgoing = self._outgoing, {}
        elif first is not None:
            calls = self._calls[first]
            found = self._found.get(first)
            word = next(iter(calls)) if found is None else found["word"]
            self.connections = {first: calls.pop(word)}
        for connection in self.connections.values():
            self._keep_alive(connection)

    def _close(self):
        """Closes what does not stay open."""
        calls = (c for calls in self._calls.values() for c in calls.values())
        for connection in (*self._outgoing.values(), *calls):
            connection.close()
        self._outgoing = {}
        self._calls = {address: {} for address in self._calls}

    def _keep_alive(self, connection):
        # A child would keep it open after the end of this process.
        forks.in_children(connection.close)
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, _IDLE),
            (socket.TCP_KEEPINTVL, _BETWEEN),
            (socket.TCP_KEEPCNT, (self._silence - _IDLE) // _BETWEEN),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    # --- staying connected --------------------------------------------------

    def tell(self, words: str) -> None:
        """Sends a line to all, who may be gone: that is noticed elsewhere."""
        for address in list(self.connections):
            self.tell_one(address, words)

    def tell_one(self, address: str, words: str) -> None:
        """Sends a line to one of them, in the same way."""
        with contextlib.suppress(OSError, KeyError):
            self.connections[address].sendall(f"{words}\n".encode())

    def listen(
        self,
        on_lost: Callable[[str, bool], None],
        on_line: Callable[[str, str], None] = lambda address, words: None,
        *,
        calls_again: bool = False,
    ) -> None:
        """Has a thread for each connection wait for lines, and for its end.

        `on_lost` is called with the address of a process that is gone before
        `end` was called, and whether its machine answers; `on_line` with an
        address and a line. A process may be called again until it is back.
        """
        for address in self.connections:
            threading.Thread(
                target=self._listen,
                args=(address, on_lost, on_line, calls_again),
                daemon=True,
            ).start()

    def _listen(self, address, on_lost, on_line, calls_again):
        def hear(words):
            if words == "ready":
                self._ready.add(address)
            else:
                on_line(address, words)

        while True:
            connection = self.connections[address]
            with connection:
                machine_answers = read_until_closed(connection, hear)
            with self._lock:
                if self._last_words:
                    return
                self._ready.discard(address)
                self._unreached[address] = "it is lost"
                self._lost_at[address] = time.monotonic()
            on_lost(address, machine_answers)
            if not calls_again:
                return
            while (reason := self._call_once(address)) is not None:
                self._unreached[address] = reason
                time.sleep(_SECONDS_BETWEEN_CALLS)
            with self._lock:
                connection = self._outgoing.pop(address)
                self._keep_alive(connection)
                self.connections[address] = connection
                if self._last_words:
                    self.tell_one(address, self._last_words)

    def wait_until_ready(self, timeout: float, others: str) -> None:
        """Returns once all have said that they serve; names missing ones."""
        end = time.monotonic() + timeout
        while missing := sorted({*self.connections} - self._ready):
            if time.monotonic() > end:
                found = "; ".join(
                    f"{a} ({self._unreached[a]})"
                    if a in self._lost_at
                    else f"{a} (it is not ready)"
                    for a in missing
                )
                raise ConnectionError(
                    f"All {others} must be running. Received: after "
                    f"{timeout:g} s, still missing: {found}. See their output."
                )
            time.sleep(_POLLING_SECONDS)

    def end(self, error: BaseException | None = None) -> None:
        """Tells all others that this process ends now, and how.

        A process that was just lost may be starting again, and is waited for.
        """
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        words = f"failed {first_line[:1000].rstrip('.')}" if error else "end"
        with self._lock:
            self._last_words = words
            self.tell(words)

        def was_just_lost(address):
            seconds = time.monotonic() - self._lost_at.get(address, -math.inf)
            is_back = address in self._ready
            return seconds < _SECONDS_TO_COME_BACK and not is_back

        while any(map(was_just_lost, list(self._lost_at))):
            time.sleep(_POLLING_SECONDS)

    def wait_for_end(self) -> None:
        """Returns when the first process has ended well, after its message."""
        lines: list[str] = []
        ((first, connection),) = self.connections.items()
        with connection:
            read_until_closed(connection, lines.append)
        word, _, error = lines[0].partition(" ") if lines else ("", "", "")
        if word != "end":
            how = "is gone, and had not ended: it was killed, or is cut off"
            if word == "failed":
                how = f"has failed with {error}"
            raise ConnectionError(
                "The chief of a cluster must run until its program is over. "
                f"Received: the chief at {first} {how}. See its last output; "
                "this process ends with it. Start all of them again."
            )


def _replace(connections, key, connection):
    """Sets a connection, and closes an earlier one of the same key."""
    before = connections.get(key)
    connections[key] = connection
    if before is not None:
        before.close()


def read_until_closed(
    connection: socket.socket, on_line: Callable[[str], None]
) -> bool:
    """Calls `on_line` with each line, and returns when the process is gone.

    True if its machine answers: the kernel there has closed the connection.
    """
    try:
        with connection.makefile(errors="replace") as lines:
            for line in lines:
                on_line(line.strip())
    except OSError as error:
        return isinstance(error, ConnectionError)
    return True
