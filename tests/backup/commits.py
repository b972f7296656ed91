"""Two workers that write backups together, of which one is killed.

    python -m tests.backup.commits FOLDER

It imports TensorFlow once, and becomes each worker by a fork before TensorFlow
has started. They tell each other what they have to by files, in the place of
TensorFlow's coordination service.
"""

import json
import os
import signal
import sys
import time
from unittest import mock

import tensorflow as tf

from tests import forked_processes
from tests.backup import trainings
from tfscale._internals import attributes
from tfscale.backup.files.folder import BackupFolder
from tfscale.backup.files.tensor_shards import TensorShard
from tfscale.cluster.coordination import Coordination
from tfscale.variables.sharding import Sharding


def parts_of(index, step):
    """What a worker has: a vector of its own."""
    value = tf.constant([float(step), float(index)])
    return [TensorShard(f"worker {index}", Sharding((2,), 4), (0, 0), value)]


def commit(folder, index, point):
    """Saves after step 1 and after step 2, in which it may be killed."""
    workers = Coordination(2, index)

    def path(key):
        return f"{folder}/said/{key.replace('/', '-')}"

    def share(key, value):
        with open(f"{path(key)}.tmp", "w") as file:
            file.write(value)
        os.rename(f"{path(key)}.tmp", path(key))

    def shared(key, timeout_in_ms):
        end = time.monotonic() + timeout_in_ms / 1e3
        while not os.path.exists(path(key)):
            if os.path.exists(f"{folder}/over"):
                workers.stop_waiting()
                return None
            if time.monotonic() > end:
                return None
            time.sleep(0.002)
        with open(path(key)) as file:
            return file.read()

    backups = BackupFolder(f"{folder}/backups", keep=1)
    with (
        mock.patch.object(attributes, "put_key_value", share),
        mock.patch.object(attributes, "get_key_value", shared),
    ):
        for step in (1, 2):
            if step == 2 and point is not None:
                trainings.kill_in_saves(f"save {point}")
            backups.commit(
                step, parts_of(index, step), {"worker": index}, workers
            )


def start(*arguments):
    def work():
        try:
            commit(*arguments)
        except OSError:
            sys.exit(2)  # who is left cannot complete the backup

    return forked_processes.fork(work)


def run(folder, killed, point):
    """Both workers to their end; returns how each one ended."""
    for name in ("said", "backups"):
        os.makedirs(f"{folder}/{name}")
    children = {
        start(folder, index, point if index == killed else None): index
        for index in (0, 1)
    }
    codes = [None, None]
    while children:
        pid, status = os.waitpid(-1, 0)
        codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        if status:
            open(f"{folder}/over", "w").close()
    return codes


def main():
    found = {}
    for worker in (0, 1):
        codes, point = None, 0
        while codes != [0, 0]:
            point += 1
            name = f"worker {worker} at {point}"
            codes = run(f"{sys.argv[1]}/{name}", worker, point)
            found[name] = codes
            if codes[worker] not in (0, -signal.SIGKILL):
                sys.exit(f"{name}: {codes}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
