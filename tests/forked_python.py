"""Runs programs of Python where TensorFlow and tfscale are imported already.

    pytest ── imports Keras and TensorFlow, starts nothing
      ├─ fork ─► the server ─┬─ fork ─► warden ── fork ─► python -m a.program
      │                      └─ fork ─► ...
      └─ fork ─► tests/a_test.py ── asks the server

A Python of its own takes 4.5 seconds of a processor to import those. A program
dies with the test that asked for it, and with the server.
"""

import functools
import gc
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings

import absl.logging
import tensorflow as tf

from tests import forked_processes

_HIDDEN_WARNINGS = (
    *(DeprecationWarning, PendingDeprecationWarning),
    *(ImportWarning, ResourceWarning),
)
# Where the server listens, in every fork of the process that began it.
_address = None
# Of processors, by programs of this process: not among what it waited for.
seconds_used = 0.0


def serve():
    """Begins the server, in a fork; TensorFlow must not have started."""
    global _address
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # a name that is free
    listener.listen(64)
    _address = listener.getsockname()
    forked_processes.fork(functools.partial(_accept, listener))
    listener.close()


def run(arguments, cwd, env=None, input="", timeout=None):
    """As `subprocess.run` of `python arguments`, which captures text.

    Args:
        arguments: `-m` or `-c`, and what follows it.
        cwd: Its folder.
        env: Its variables. What TensorFlow reads when it is imported was read.
        input: What it reads.
        timeout: Seconds until it is killed, which is an error.
    """
    global seconds_used
    with (
        tempfile.TemporaryFile("w+") as stdin,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
        socket.socket(socket.AF_UNIX) as server,
    ):
        stdin.write(input)
        stdin.seek(0)
        files = (stdin, stdout, stderr)
        server.settimeout(timeout)
        server.connect(_address)
        socket.send_fds(server, [b"."], [file.fileno() for file in files])
        env = dict(os.environ if env is None else env)
        server.sendall(pickle.dumps((list(arguments), cwd, env)))
        with server.makefile("rb") as answer:
            status, seconds = pickle.load(answer)
        seconds_used += seconds
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(
            arguments,
            os.waitstatus_to_exitcode(status),
            stdout.read(),
            stderr.read(),
        )


def _accept(listener):
    import tfscale  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # wardens leave nothing
    while True:
        client, _ = listener.accept()
        forked_processes.fork(functools.partial(_guard, listener, client))
        client.close()


def _guard(listener, client):
    """What a warden does: has a program run, and kills it if nobody waits."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    _, files, _, _ = socket.recv_fds(client, 1, 3)
    request = pickle.load(client.makefile("rb"))
    child = forked_processes.fork(
        functools.partial(_become, client, files, *request)
    )

    def watch():
        client.recv(1)
        os.kill(child, signal.SIGKILL)

    watcher = forked_processes.fork(watch)
    _, status, used = os.wait4(child, 0)
    forked_processes.kill([watcher])
    client.sendall(pickle.dumps((status, used.ru_utime + used.ru_stime)))


def _become(client, files, arguments, cwd, env):
    client.close()
    for stream, file in enumerate(files):
        os.dup2(file, stream)
        os.close(file)
    sys.stdin = os.fdopen(0)
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    # Those that log took another one when they were imported.
    absl.logging.get_absl_handler().python_handler.setStream(sys.stderr)
    for handler in tf.get_logger().handlers:
        handler.setStream(sys.stderr)
    # A warning is an error where pytest forks, and not where Python begins.
    warnings.resetwarnings()
    for hidden in _HIDDEN_WARNINGS:
        warnings.simplefilter("ignore", hidden)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    gc.enable()
    kind, program, *rest = arguments
    sys.argv = [kind, *rest]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(program, vars(main))
