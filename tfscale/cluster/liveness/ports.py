"""Who is there, by whether its port answers.

The system closes a port when its process ends, however it ended, and opens it
for one that was started again. So where processes may come back, a chief with
parameter servers and those that serve it ask each other's ports:

    the chief's port   refused ... answers ... answers ... refused
    a server           waits       serves                  exits with 0
"""

import logging
import socket
import threading
import time
from collections.abc import Collection

_SECONDS_BETWEEN_LOOKS = 1.0
# After how many it is said who is waited for.
_SECONDS_WITHOUT_WORDS = 10.0
# A machine that does not answer at all may come back; a closed port does not.
_SECONDS_OF_SILENCE = 60.0


def connect(address: str) -> socket.socket:
    """A connection with what listens at an address `host:port`.

    Raises:
        OSError: If nothing does; `reason` says it in words.
    """
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), 2.0)


def serve(port: int) -> socket.socket:
    """Listens at a port, on all addresses of this machine, as TensorFlow does.

    Raises:
        OSError: If something else has the port.

    Example:

    >>> serve(0).close()
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=128)


def listen(address: str, patience: float = 0.0) -> socket.socket:
    """Listens at the port of an address of this process.

    Args:
        address: An address `host:port`.
        patience: Seconds to wait for the port. One that was killed has it until
            the kernel is done with it.

    Raises:
        OSError: If something else has the port.

    Example:

    >>> listen("localhost:0").close()
    """
    port = address.rpartition(":")[2]
    end = time.monotonic() + patience
    while True:
        try:
            return serve(int(port))
        except OSError as error:
            if time.monotonic() > end:
                raise OSError(
                    "A process of a cluster must have its port for itself. "
                    f"Received: {address}, and port {port} of this machine "
                    f"cannot be had ({error.strerror}). End what uses it, or "
                    "take another port."
                ) from None
        time.sleep(0.05)


def reason(error: OSError) -> str:
    """Why nothing was reached at an address.

    Example:

    >>> reason(ConnectionRefusedError())
    'nothing listens at its port'
    """
    if isinstance(error, socket.gaierror):
        return "its name cannot be resolved"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens at its port"
    if isinstance(error, TimeoutError):
        return "no answer"
    return error.strerror or str(error)


def answers(address: str) -> bool:
    """Whether something listens at an address `host:port`.

    Example:

    >>> answers("localhost:1")
    False
    """
    return _ask(address) is None


def wait_for_all(addresses: Collection[str], timeout: float) -> None:
    """Returns once all workers and parameter servers of a chief answer.

    Args:
        addresses: Theirs.
        timeout: Seconds after which one that does not is an error.

    Raises:
        ConnectionError: If one does not; says which, and why.
    """
    missing = dict.fromkeys(addresses, "not tried yet")
    over = threading.Event()

    def reach(address):
        while not over.is_set():
            try:
                connect(address).close()
            except OSError as error:
                missing[address] = reason(error)
                over.wait(0.1)
            else:
                del missing[address]
                return

    threads = [
        threading.Thread(target=reach, args=(address,), daemon=True)
        for address in addresses
    ]
    start = time.monotonic()
    said = False
    for thread in threads:
        thread.start()
    while missing:
        waited = time.monotonic() - start
        found = "; ".join(f"{a} ({why})" for a, why in missing.copy().items())
        if waited > timeout:
            over.set()
            raise ConnectionError(
                "All workers and parameter servers must be there. Received: "
                f"after {timeout:g} s, still missing: {found}. Start them, or "
                "correct the addresses."
            )
        if waited > _SECONDS_WITHOUT_WORDS and not said:
            said = True
            logging.warning("Waiting for %s.", found)
        time.sleep(0.02)


class ChiefPort:
    """How one that serves a chief with parameter servers knows of its end.

    Args:
        address: That of the chief.
        timeout: Seconds in which it must begin to answer.

    Raises:
        ConnectionError: If it does not.
    """

    def __init__(self, address: str, timeout: float):
        self._address = address
        start, said = time.monotonic(), False
        while not answers(address):
            waited = time.monotonic() - start
            if waited > _SECONDS_WITHOUT_WORDS and not said:
                said = True
                logging.warning("Waiting for the chief at %s.", address)
            if waited > timeout:
                raise ConnectionError(
                    "Workers and parameter servers must have a chief. "
                    f"Received: no answer from {address} for {timeout:g} s. "
                    "Start it, and make a `tfscale.ParameterServerStrategy` "
                    "there."
                )
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def wait_for_end(self) -> None:
        """Returns when the chief has ended.

        Raises:
            ConnectionError: If it falls silent.
        """
        answered = time.monotonic()
        while True:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            refused = _ask(self._address)
            if refused is None:
                answered = time.monotonic()
            elif refused:
                return
            elif time.monotonic() - answered > _SECONDS_OF_SILENCE:
                raise ConnectionError(
                    "The chief must answer as long as it is served. Received: "
                    f"nothing from {self._address} for "
                    f"{_SECONDS_OF_SILENCE:g} s. Look at what it printed, and "
                    "at the network."
                )


def _ask(address):
    """None if it answers, or else whether the port is closed."""
    try:
        connect(address).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return None
