"""A Python where TensorFlow, tfscale and what tests use are imported already.

    pytest ── imports all tests, starts nothing
      ├─ fork ─► the server ─┬─ fork ─► warden ── fork ─► the program
      │                      └─ fork ─► ...   ▲ signals, its end
      └─ fork ─► tests/a_test.py ── Popen([executable(), "-m", "a.program"])
                                     is forked_python_client.py

A Python of its own takes 4.5 seconds of a processor to import those. The client
has the pipes, the signals and the exit code of the program, which dies with it,
and with the server. To the program, `sys.executable` is the client: what it
starts is forked as well.
"""

import atexit
import contextlib
import functools
import gc
import logging
import marshal
import os
import random
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings

import absl.logging
import numpy as np
import tensorflow as tf
from absl import flags

from tests import forked_processes

# Those that a program imports anew, with the flags that they define.
_PROGRAMS = ("benchmarks", "examples", "tests", "tfscale.launch")
_HIDDEN_WARNINGS = (
    *(DeprecationWarning, PendingDeprecationWarning),
    *(ImportWarning, ResourceWarning),
)
# Where the seconds of processors of programs are noted: they are no children
# of the process that asked for them.
_USED = "FORKED_PYTHON_USED"
_folder = None
_first_flags = set(flags.FLAGS)


def serve():
    """Begins the server, in a fork; TensorFlow must not have started."""
    global _folder
    _folder = tempfile.mkdtemp()
    # Processes that are killed, or end at once, leave files, and AutoGraph's.
    os.environ["TMPDIR"] = tempfile.tempdir = os.path.join(_folder, "tmp")
    os.mkdir(tempfile.tempdir)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # a name that is free
    listener.listen(64)
    client = os.path.join(os.path.dirname(__file__), "forked_python_client.py")
    address = listener.getsockname()[1:].decode()
    command = shlex.join([sys.executable, "-IS", client, address])
    with open(executable(), "w") as file:
        file.write(f'#!/bin/sh\nexec {command} "$@"\n')
    os.chmod(executable(), 0o700)
    gc.freeze()
    forked_processes.fork(functools.partial(_accept, listener))
    listener.close()


def end():
    """Removes the files of the server, which ends with this process."""
    if _folder is not None:
        shutil.rmtree(_folder, ignore_errors=True)


def executable():
    """Path of what takes the place of `sys.executable`.

    It knows `-m`, `-c` and a program's path. What TensorFlow reads of the
    environment when it is imported was read. At the end of a program, C++ does
    not tidy up.
    """
    return os.path.join(_folder, "python")


def run(arguments, cwd, env=None, input="", timeout=None):
    """As `subprocess.run` of `python arguments`, which captures text."""
    return subprocess.run(
        [executable(), *arguments],
        cwd=cwd,
        env=env,
        input=input,
        timeout=timeout,
        capture_output=True,
        text=True,
    )


def output(arguments, cwd, **options):
    """All that `python arguments` prints; it has to end well."""
    process = run(arguments, cwd, **options)
    text = process.stdout + process.stderr
    assert process.returncode == 0, text
    return text


def count_seconds():
    """From here on programs of this process are counted."""
    os.environ[_USED] = os.path.join(_folder, f"used-{os.getpid()}")


def seconds_used():
    """Of processors, by those that have ended."""
    if not os.path.exists(os.environ[_USED]):
        return 0.0
    with open(os.environ[_USED]) as file:
        return sum(map(float, file))


def _accept(listener):
    import tfscale  # noqa: F401

    for module in list(sys.modules):
        if module.startswith(tuple(f"{name}." for name in _PROGRAMS)):
            del sys.modules[module]
    for name in set(flags.FLAGS) - _first_flags:
        delattr(flags.FLAGS, name)
    atexit._clear()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # wardens leave nothing
    while True:
        client, _ = listener.accept()
        forked_processes.fork(functools.partial(_guard, listener, client))
        client.close()


def _guard(listener, client):
    """What a warden does: has a program run, and kills it if nobody waits."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    size, files, _, _ = socket.recv_fds(client, 4, 3)
    with client.makefile("rb") as reader:
        arguments, cwd, env = marshal.loads(
            reader.read(int.from_bytes(size, "big"))
        )
    child = forked_processes.fork(
        functools.partial(_become, client, files, arguments, cwd, env)
    )
    for file in files:
        os.close(file)
    ended = os.pidfd_open(child)
    while ended not in select.select([client, ended], [], [])[0]:
        (number,) = client.recv(1) or [signal.SIGKILL]
        os.kill(child, number)
        if number == signal.SIGKILL:
            break
    _, status, used = os.wait4(child, 0)
    if _USED in env and os.path.isdir(os.path.dirname(env[_USED])):
        with open(env[_USED], "a") as file:
            file.write(f"{used.ru_utime + used.ru_stime}\n")
    with contextlib.suppress(BrokenPipeError):
        client.sendall(status.to_bytes(4, "big"))


def _become(client, files, arguments, cwd, env):
    client.close()
    os.setsid()  # a signal to its group is not for pytest
    for stream, file in enumerate(files):
        os.dup2(file, stream)
        os.close(file)
    unbuffered = 1 if env.get("PYTHONUNBUFFERED") else -1
    sys.stdin = os.fdopen(0)
    sys.stdout = os.fdopen(1, "w", buffering=unbuffered)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    # Those that log took another one when they were imported.
    absl.logging.get_absl_handler().python_handler.setStream(sys.stderr)
    for handler in tf.get_logger().handlers:
        handler.setStream(sys.stderr)
    logging.root.handlers.clear()  # those of pytest, which keep what is logged
    # A warning is an error where pytest forks, and not where Python begins.
    warnings.resetwarnings()
    for hidden in _HIDDEN_WARNINGS:
        warnings.simplefilter("ignore", hidden)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.executable = executable()
    random.seed()
    np.random.seed()
    # Seldom: what is traced is thousands of objects, and no garbage.
    gc.set_threshold(100_000)
    gc.enable()
    try:
        _run(*arguments)
    except BaseException as error:
        if not isinstance(error, SystemExit):
            forked_processes.say_error()  # before what follows
            raise SystemExit(1) from None
        raise
    finally:
        # As at the end of a program.
        threading._shutdown()
        atexit._run_exitfuncs()


def _run(program, *arguments):
    if program == "-m":
        program, *arguments = arguments
        sys.argv = ["-m", *arguments]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif program == "-c":
        program, *arguments = arguments
        sys.argv = ["-c", *arguments]
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(program, vars(main))
    else:
        sys.argv = [program, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
        runpy.run_path(program, run_name="__main__")
