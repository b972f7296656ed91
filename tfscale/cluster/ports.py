"""The ports of a cluster: listening at them, and calling there."""

import contextlib
import os
import socket
import time


def connect(address: str) -> socket.socket:
    """A connection with what listens at an address `host:port`."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), 2.0)


def serve(port: int) -> socket.socket:
    """Listens at a port of all addresses of this machine, as TensorFlow."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=128)


def listen(address: str, patience: float = 0.0) -> socket.socket:
    """Listens at the port of an address of this process.

    It waits `patience` seconds for the port: that of a process that was killed
    is in use until the kernel is done with it. Then it is an `OSError`.
    """
    port = address.rpartition(":")[2]
    end = time.monotonic() + patience
    while True:
        try:
            return serve(int(port))
        except OSError as error:
            if time.monotonic() > end:
                raise OSError(
                    "The port of a process of a cluster must be free. "
                    f"Received: {address}, and port {port} of this machine is "
                    f"in use ({error.strerror}). End the program that uses it, "
                    "or choose another port."
                ) from None
        time.sleep(0.05)


def reason(error: OSError | ValueError) -> str:
    """Why an address could not be reached, or did not answer as a member."""
    if isinstance(error, ValueError):
        return "something else listens at its port"
    if isinstance(error, socket.gaierror):
        return "its name cannot be resolved"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens at its port"
    if isinstance(error, TimeoutError):
        return "no answer"
    return error.strerror or str(error)


def answers(address: str) -> bool:
    """Whether a process listens at an address `host:port`."""
    with contextlib.suppress(OSError):
        connect(address).close()
        return True
    return False


def cut_off(address: str) -> None:
    """Closes all connections of this process to an address, whoever has them.

    The kernel does so when a machine that was gone is there again, and does not
    know them. (Linux.)
    """
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )
        peers = {_plain(*peer[:2]) for *_, peer in found}
        for name in os.listdir("/proc/self/fd"):
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(int(name))) as one,
            ):
                if _plain(*one.getpeername()[:2]) in peers:
                    one.shutdown(socket.SHUT_RDWR)


def _plain(host, port):
    """An address of IPv4 may be written as one of IPv6."""
    return host.removeprefix("::ffff:"), port
