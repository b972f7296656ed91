"""The chief of parameter servers ends, in one of several ways.

`python -m tests.cluster.lost_chief FOLDER`, by lost_chief_test.py; the way is
the content of `FOLDER/way`.
"""

import os
import signal
import sys
import threading
import time

import tfscale
from tfscale.cluster import coordinator


def lose_worker(folder):
    """Kills worker 0, and returns once that is known."""
    with open(os.path.join(folder, "worker0.pid")) as file:
        os.kill(int(file.read()), signal.SIGKILL)
    while len(coordinator._servers._ready) == 2:
        time.sleep(0.01)


def start_worker(folder, is_due=lambda: True):
    """Starts the worker that is in reserve, once it is due."""
    while not is_due():
        time.sleep(0.01)
    open(os.path.join(folder, "worker0.spare"), "w").close()


def main():
    folder = sys.argv[1]
    with open(os.path.join(folder, "way")) as file:
        way = file.read()
    tfscale.initialize()
    if way == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "fails":
        raise ValueError("There is no such file.\nNor another one.")
    if way == "exits":
        sys.exit(3)
    if way == "a worker comes back":
        lose_worker(folder)
        start_worker(folder)
        while len(coordinator._servers._ready) < 2:
            time.sleep(0.01)
    if way == "a worker comes back late":
        lose_worker(folder)
        threading.Thread(
            target=start_worker,
            args=(folder, lambda: coordinator._servers._last_words),
            daemon=True,
        ).start()


if __name__ == "__main__":
    main()
