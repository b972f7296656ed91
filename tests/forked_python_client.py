"""Stands for a program of `forked_python.py`: starts, is signalled and ends.

    python -IS forked_python_client.py ADDRESS -m a.program --its_flag

It imports next to nothing, and so begins within hundredths of a second.
"""

import marshal
import os
import resource
import signal
import socket
import sys

_PASSED_ON = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM),
)


def main():
    _, address, *arguments = sys.argv
    server = socket.socket(socket.AF_UNIX)
    server.connect(f"\0{address}")
    request = marshal.dumps((arguments, os.getcwd(), dict(os.environ)))
    socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(request)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    status = server.recv(4)
    if not status:
        sys.exit("The server of forked programs is gone.")
    code = os.waitstatus_to_exitcode(int.from_bytes(status, "big"))
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code in _PASSED_ON:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


if __name__ == "__main__":
    main()
