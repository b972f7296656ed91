"""Who is still there: a connection from each server to its coordinator.

When a process ends, the kernel closes its connections, however it ended; when
a machine is gone, the kernel of the other side asks a few times (TCP's keep
alive) and gives up. Neither needs a thread that must not be late:

    server                         coordinator
    "here a:2222 WORD" ──────────► listens at its own port, before TensorFlow
                  ◄─────────────── "welcome"
    "heard"       ───────────────►
        ...                            ...
                  ◄─────────────── "end", as its program ends
    closed after "end": exits      and lets go of what it has in servers
    closed without "end": lost     closed: that server is lost
"""

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable
from collections.abc import Collection

from tfscale.cluster.liveness import ports
from tfscale.cluster.reception import Reception
from tfscale.cluster.reception import read_line

# A machine that is gone is noticed after _IDLE + _TRIES * _BETWEEN seconds.
_IDLE, _BETWEEN, _TRIES = 4, 2, 3
# Longer than a server waits for its welcome: it has then let go, or has it.
_SECONDS_TO_HEAR = 10.0
_SECONDS_BETWEEN_LOOKS = 0.02


class Roster:
    """The coordinator's end of the connections.

    Args:
        address: That of the coordinator. Its port is free again once
            `wait_for` has returned.
        word: Which only its servers know, and say when they call.

    Attributes:
        connections: With the servers so far, by address.
    """

    def __init__(self, address: str, word: str = ""):
        self._address = address
        self._word = word
        self.connections: dict[str, socket.socket] = {}
        self._has_ended = False

    def wait_for(self, servers: Collection[str], timeout: float) -> None:
        """Returns once all servers have connected.

        Args:
            servers: Their addresses.
            timeout: Seconds after which a missing one is an error.

        Raises:
            ConnectionError: If a server is missing; says which.
        """
        end = time.monotonic() + timeout
        greet = functools.partial(self._greet, servers)
        with Reception(ports.listen(self._address), greet) as reception:
            self.connections = reception.met
            while missing := sorted(set(servers) - set(reception.met)):
                if time.monotonic() > end:
                    raise ConnectionError(
                        "All servers must start before the coordinator goes "
                        f"on. Received: after {timeout:g} s, at "
                        f"{self._address}, none from {', '.join(missing)}. "
                        "What they print says why."
                    )
                time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _greet(self, servers, connection):
        # Those that were greeted already go on, and TensorFlow calls here.
        words = read_line(connection, 2.0, beginning=b"here ")
        word, _, found = words.partition(" ")
        address, _, found = found.partition(" ")
        if word != "here" or address not in servers or found != self._word:
            return None
        connection.sendall(b"welcome\n")
        # One that has waited too long has let go of this connection, and
        # calls again.
        if read_line(connection, _SECONDS_TO_HEAR) != "heard":
            return None
        _keep_alive(connection)
        return address

    def watch(self, on_lost: Callable[[str, bool], None]) -> None:
        """Has a thread for each server wait for its end.

        Args:
            on_lost: Called with the address of a server that is gone before
                `end` was called, and whether its machine still answers.
        """
        for address, connection in self.connections.items():
            threading.Thread(
                target=self._wait,
                args=(address, connection, on_lost),
                daemon=True,
            ).start()

    def _wait(self, address, connection, on_lost):
        with connection:
            answers = _wait_for_close(connection)
        if not self._has_ended:
            on_lost(address, answers)

    def end(self) -> None:
        """Tells all servers that it is over as soon as this process ends."""
        self._has_ended = True
        for connection in self.connections.values():
            with contextlib.suppress(OSError):  # It may be gone already.
                connection.sendall(b"end\n")


class Presence:
    """A server's end of the connection.

    Args:
        address: That of the server.
        coordinator: That of the coordinator.
        timeout: Seconds in which the coordinator must answer.
        word: See `Roster`.

    Attributes:
        connection: With the coordinator.

    Raises:
        ConnectionError: If it does not.
    """

    def __init__(
        self, address: str, coordinator: str, timeout: float, word: str = ""
    ):
        self._coordinator = coordinator
        end = time.monotonic() + timeout
        while True:
            connection = self._call(f"here {address} {word}\n".encode())
            if connection is not None:
                break
            if time.monotonic() > end:
                raise ConnectionError(
                    "The coordinator must be there for its servers. Received: "
                    f"no answer from {coordinator} in {timeout:g} s. What it "
                    "prints says why."
                )
            time.sleep(0.1)
        self.connection = connection

    def _call(self, words):
        try:
            connection = ports.connect(self._coordinator)
        except OSError:
            return None
        try:
            connection.sendall(words)
            if read_line(connection, 2.0) == "welcome":
                connection.sendall(b"heard\n")
                _keep_alive(connection)
                return connection
        except (OSError, ValueError):
            pass  # The pre-flight was still listening there.
        connection.close()
        return None

    def wait_for_end(self) -> None:
        """Returns when the coordinator has ended, and said before that it will.

        Raises:
            ConnectionError: If it is gone without having said so.
        """
        with self.connection as connection:
            try:
                with connection.makefile() as lines:
                    word = lines.readline()
                _wait_for_close(connection)
            except OSError:
                word = ""
        if word != "end\n":
            raise ConnectionError(
                "A coordinator must stay until its program is over. Received: "
                f"{self._coordinator} is gone, and had not ended. What it "
                "printed says why; this server ends with it."
            )


def _keep_alive(connection):
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _IDLE),
        (socket.TCP_KEEPINTVL, _BETWEEN),
        (socket.TCP_KEEPCNT, _TRIES),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _wait_for_close(connection):
    """Whether the kernel at the other side said that it is closed."""
    try:
        while connection.recv(256):
            pass
    except TimeoutError:
        return False
    except OSError as error:
        return isinstance(error, ConnectionError)
    return True
