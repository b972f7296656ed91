"""Processes that are forked where TensorFlow is imported, but has not started.

Importing it takes longer than most of what they do.
"""

import ctypes
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1
_held = []


def free_addresses(count):
    """So many addresses of this machine at which nobody listens.

    Until this process ends, the system gives their ports to none of those that
    ask for any one, as callers do: a server begins seconds after this. With
    `SO_REUSEADDR`, as servers have it, it can listen there.
    """
    sockets = [socket.socket() for _ in range(count)]
    _held.extend(sockets)
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("localhost", 0))
    return [f"localhost:{one.getsockname()[1]}" for one in sockets]


def fork(work):
    """Has a child do `work`; returns its process id.

    It dies with this process. Its exit code is 0, or that of a `SystemExit`,
    or 1 after another exception, which it prints.
    """
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        die_with(parent)
        work()
        code = 0
    except SystemExit as error:
        code = error.code
        if code and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        say_error()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def say_error():
    """Says which error ends a program, as Python does at its end."""
    sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
    sys.excepthook(*sys.exc_info())


def output_of(work):
    """The wait status of a child that does `work`, and what it printed."""
    read, write = os.pipe()

    def speak():
        os.dup2(write, 1)
        os.dup2(write, 2)
        work()

    child = fork(speak)
    os.close(write)
    with os.fdopen(read) as file:
        said = file.read()
    return os.waitpid(child, 0)[1], said


def die_with(parent):
    """Has this process killed when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def kill(children):
    """Kills what is left of children, and waits for them."""
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
