"""Connections from the chief to all other processes, which tell who is alive.

When a process ends, the kernel closes its connections; when a machine is gone,
the kernel of the other side asks a few times (TCP's keep alive) and gives up.
Neither needs a thread with deadlines:

    chief                          another process
    "chief WORD b:2222" ─────────► listens at its own port, before TensorFlow
                  ◄─────────────── "here"
    "heard"       ───────────────►
                  ◄─────────────── "ready", once TensorFlow has the port
        ...                            ...
    "end", as its program ends ──► exits, as soon as the connection is closed
    "failed ValueError: ..." ────► exits with an error that says so
    closed without a word ───────► the chief was killed: an error too
    calls again   ◄─────────────── closed: that process is lost

The chief calls, since a restarted process has a free port, while TensorFlow
uses the chief's.
"""

import contextlib
import logging
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from collections.abc import Collection

from tfscale.cluster.liveness import ports
from tfscale.cluster.reception import Reception
from tfscale.cluster.reception import read_line

# Seconds after which a machine that is gone is noticed, and of its keep alive.
_SILENCE, _IDLE, _BETWEEN = 10, 4, 2
_SECONDS_TO_ANSWER = 2.0
# Longer than the chief waits for an answer.
_SECONDS_TO_HEAR = 10.0
_SECONDS_TO_GET_READY = 60.0
_SECONDS_BETWEEN_CALLS = 0.1
_POLLING_SECONDS = 0.02
_NOT_CALLED = "not called yet"
_SECONDS_TO_COME_BACK = 10.0
# Seconds after which the missing processes are logged.
_SECONDS_WITHOUT_WORDS = 10.0
_connections: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


class Roster:
    """The chief's end of the connections: to those that are ready, by address.

    Args:
        word: A word that only the processes of this cluster know.
        others: The name of the other processes in errors.
        silence: Seconds after which a machine that is silent is lost.
    """

    def __init__(
        self, word: str = "", others: str = "servers", silence: int = _SILENCE
    ):
        self._word = word
        self._others = others
        self._silence = silence
        self.connections: dict[str, socket.socket] = {}
        self._missing: dict[str, str] = {}  # and why
        self._lost_at: dict[str, float] = {}
        self._watched: set[str] = set()
        self._last_words = ""
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    def wait_for(self, servers: Collection[str], timeout: float) -> None:
        """Returns once all others are there, and ready; names missing ones."""
        start, is_logged = time.monotonic(), False
        self._is_over.clear()
        for server in {*servers} - {*self.connections, *self._missing}:
            self._missing[server] = _NOT_CALLED
            _in_a_thread(self._call_until_ready, server)
        while missing := sorted({*servers} - {*self.connections}):
            waited = time.monotonic() - start
            is_called = _NOT_CALLED not in self._missing.values()
            found = "; ".join(f"{a} ({self._missing.get(a)})" for a in missing)
            if waited > timeout and is_called:
                self._is_over.set()
                self._missing.clear()
                raise ConnectionError(
                    f"All {self._others} must be there. Received: after "
                    f"{timeout:g} s, still missing: {found}. What they print "
                    "says why. Start them, or correct the addresses."
                )
            if waited > _SECONDS_WITHOUT_WORDS and not is_logged:
                is_logged = True
                logging.warning("Waiting for %s.", found)
            time.sleep(_POLLING_SECONDS)

    def _call_until_ready(self, server):
        seconds = 0.0
        while not self._is_over.wait(seconds):
            seconds = _SECONDS_BETWEEN_CALLS
            connection = None
            try:
                connection = ports.connect(server)
                if self._missing.get(server) == _NOT_CALLED:
                    self._missing[server] = "it does not answer"
                self._greet(server, connection)
            except (OSError, ValueError) as error:
                if connection is not None:
                    connection.close()
                self._missing[server] = ports.reason(error)
                continue
            with self._lock:
                self._missing.pop(server, None)
                self.connections[server] = connection
                if self._last_words:
                    tell(connection, self._last_words)
            return

    def _greet(self, server, connection):
        connection.sendall(f"chief {self._word} {server}\n".encode())
        connection.settimeout(_SECONDS_TO_ANSWER)
        answer = read_line(connection, _SECONDS_TO_ANSWER, beginning=b"here")
        if answer != "here":
            raise ValueError(f"Not what another process says: {answer[:100]!r}")
        connection.sendall(b"heard\n")
        if read_line(connection, _SECONDS_TO_GET_READY) != "ready":
            raise ConnectionResetError("it has ended before it was ready")
        _keep_alive(connection, self._silence)

    def watch(self, on_lost: Callable[[str, bool], None] | None = None) -> None:
        """Has a thread for each of the others wait for its end.

        `on_lost` is called with the address of a process that is gone before
        `end` was called, and whether its machine answers. By default the
        process is called again, until it is back.
        """
        for server in {*self.connections} - self._watched:
            self._watched.add(server)
            _in_a_thread(self._watch, server, on_lost)

    def _watch(self, server, on_lost):
        while server in self.connections:
            connection = self.connections[server]
            with connection:
                machine_answers = read_until_closed(connection)
            with self._lock:
                if self._last_words:
                    return
                if on_lost is None:
                    self._missing[server] = "it is lost"
                    self._lost_at[server] = time.monotonic()
                    del self.connections[server]
            if on_lost is not None:
                on_lost(server, machine_answers)
                return
            self._call_until_ready(server)
        self._watched.discard(server)

    def end(self, error: BaseException | None = None) -> None:
        """Tells all others that this process ends now, and how.

        A process that was just lost may be starting again, and is waited for.
        """
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        words = f"failed {first_line[:1000].rstrip('.')}" if error else "end"
        with self._lock:
            self._last_words = words
            for connection in self.connections.values():
                tell(connection, words)

        def was_just_lost(server):
            seconds = time.monotonic() - self._lost_at.get(server, -math.inf)
            return seconds < _SECONDS_TO_COME_BACK

        while any(map(was_just_lost, [*self._missing])):
            time.sleep(_POLLING_SECONDS)


class Presence:
    """The other end of a connection with the chief, see `Roster`.

    The port of the process is free again once the chief has called.
    """

    def __init__(
        self,
        address: str,
        chief: str,
        timeout: float,
        word: str = "",
        silence: int = _SILENCE,
    ):
        self._chief = chief
        self._words = f"chief {word} {address}"
        start, is_logged = time.monotonic(), False
        with Reception(ports.listen(address, 5.0), self._greet) as reception:
            while chief not in reception.met:
                waited = time.monotonic() - start
                if waited > timeout:
                    raise ConnectionError(
                        "Workers and servers must have a chief. Received: no "
                        f"call from {chief} in {timeout:g} s. Start it; what "
                        "it prints says why it does not call."
                    )
                if waited > _SECONDS_WITHOUT_WORDS and not is_logged:
                    is_logged = True
                    logging.warning("Waiting for the chief at %s.", chief)
                time.sleep(_POLLING_SECONDS)
        self.connection = reception.met[chief]
        _keep_alive(self.connection, silence)

    def _greet(self, connection):
        # Strangers and the chief's TensorFlow call this port too.
        words = read_line(connection, _SECONDS_TO_ANSWER, beginning=b"chief ")
        if words != self._words:
            return None
        connection.sendall(b"here\n")
        # A chief that has waited too long closes and calls again.
        heard = read_line(connection, _SECONDS_TO_HEAR)
        return self._chief if heard == "heard" else None

    def be_ready(self) -> None:
        """Tells the chief that this process serves."""
        tell(self.connection, "ready")

    def wait_for_end(self) -> None:
        """Returns when the chief has ended well, after its message."""
        lines: list[str] = []
        with self.connection as connection:
            read_until_closed(connection, lines.append)
        word, _, error = lines[0].partition(" ") if lines else ("", "", "")
        if word != "end":
            how = "is gone, and had not ended: it was killed, or is cut off"
            if word == "failed":
                how = f"has failed with {error}"
            raise ConnectionError(
                "The chief of a cluster must stay until its program is over. "
                f"Received: the chief at {self._chief} {how}. What it printed "
                "says why; this process ends with it. Start all of them again."
            )


def tell(connection: socket.socket, words: str) -> None:
    """Sends a line to a process, which may be gone: that is noticed later."""
    with contextlib.suppress(OSError):
        connection.sendall(f"{words}\n".encode())


def read_until_closed(
    connection: socket.socket, on_line: Callable[[str], None] | None = None
) -> bool:
    """Calls `on_line` with each line, and returns when the process is gone.

    True if its machine answers: the kernel there has closed the connection.
    """
    try:
        with connection.makefile(errors="replace") as lines:
            for line in lines:
                if on_line is not None:
                    on_line(line.strip())
    except OSError as error:
        return isinstance(error, ConnectionError)
    return True


def _in_a_thread(work, *args):
    threading.Thread(target=work, args=args, daemon=True).start()


def _keep_alive(connection, silence):
    _connections.add(connection)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _IDLE),
        (socket.TCP_KEEPINTVL, _BETWEEN),
        (socket.TCP_KEEPCNT, (silence - _IDLE) // _BETWEEN),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _let_go():
    """A forked child would keep its parent's connection open."""
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_let_go)
