"""Serves callers at a port in parallel, each for a limited time.

Any program may call a port: a scanner of open ports, a client that sends
nothing or a byte a second, one that never ends its line. None of them delays
the expected processes, or takes more than 64 KiB.

    a member    ──► heard ──► kept
    silence     ──► heard, for two seconds
    ...         ──► of too many, the first one is closed
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

# Bounds of what strangers can take.
MAX_LINE_BYTES = 65_536
_MAX_CALLERS = 256
_POLLING_SECONDS = 0.1


class Reception:
    """Greets callers, each in a thread, until it is closed.

    Args:
        listener: Where they call; it is closed with this.
        greet: Called with a connection. Returns a function that keeps it, or
            None: it is closed then, as after an `OSError` or `ValueError`.
    """

    def __init__(
        self,
        listener: socket.socket,
        greet: Callable[[socket.socket], Callable[[], None] | None],
    ):
        self._listener = listener
        self._greet = greet
        self._lock = threading.Lock()
        self._callers: dict[socket.socket, threading.Thread] = {}
        self._is_over = False
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Reception":
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the listener, and all connections but those that are kept."""
        with self._lock:
            self._is_over = True
            threads = [self._thread, *self._callers.values()]
            for connection in self._callers:
                _hang_up(connection)
        for thread in threads:
            thread.join()
        self._listener.close()

    def _accept(self):
        self._listener.settimeout(_POLLING_SECONDS)
        while not self._is_over:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # Or no file is free.
                time.sleep(_POLLING_SECONDS)
                continue
            thread = threading.Thread(
                target=self._hear, args=(connection,), daemon=True
            )
            with self._lock:
                if self._is_over:
                    connection.close()
                    return
                if len(self._callers) == _MAX_CALLERS:
                    _hang_up(next(iter(self._callers)))
                self._callers[connection] = thread
                thread.start()

    def _hear(self, connection):
        keep = None
        with contextlib.suppress(OSError, ValueError):
            keep = self._greet(connection)
        with self._lock:
            del self._callers[connection]
            if keep is not None and not self._is_over:
                keep()
                return
        connection.close()


def read_line(
    connection: socket.socket,
    seconds: float,
    *,
    beginning: bytes = b"",
    max_bytes: int = MAX_LINE_BYTES,
) -> str:
    """A line, or its beginning if the sender closes.

    It is an `OSError` if it does not come in time, a `ValueError` if it is
    longer, and ends early where it does not begin with `beginning`.
    """
    end = time.monotonic() + seconds
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, end - time.monotonic()))
        seen = connection.recv(4096, socket.MSG_PEEK)
        if not seen:
            break
        line += connection.recv(seen.find(b"\n") + 1 or len(seen))
        if len(line) > max_bytes:
            raise ValueError(f"A line of more than {max_bytes} bytes.")
        if not line.startswith(beginning[: len(line)]):
            break
        if time.monotonic() > end:
            raise TimeoutError("A line that takes too long.")
    return line.decode(errors="replace").strip()


def _hang_up(connection):
    """Wakes the thread that reads from a connection."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
