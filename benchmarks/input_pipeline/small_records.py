"""Small records per second: tfscale beside tf.data by hand, Grain and torch.

Every round runs each contestant for one epoch, in a rotated order; compared are
the ratios within a round, by the clock and by what the processor works, worker
processes included. Whoever shuffles has the whole epoch to shuffle.

python -m benchmarks.input_pipeline.small_records
python -m benchmarks.input_pipeline.small_records --only=examples --peers
"""

import multiprocessing
import os
import platform
import re
import resource
import statistics
import tempfile
import time

import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

from benchmarks.input_pipeline import small_contestants

NUM_RECORDS = flags.DEFINE_integer(
    "num_records", 100_000, "Records in an epoch.", lower_bound=1024
)
NUM_ROUNDS = flags.DEFINE_integer(
    "num_rounds", 5, "Epochs of each contestant.", lower_bound=1
)
ONLY = flags.DEFINE_string(
    "only", "", "Regular expression: tasks whose names hold it are run."
)
PEERS = flags.DEFINE_boolean(
    "peers", False, "Whether Grain and torch take part; they must be installed."
)


def _processor():
    """Seconds that this process and its workers have worked."""
    ended = sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(
            resource.getrusage,
            (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN),
        )
    )
    return ended + sum(
        _of_process(child.pid) for child in multiprocessing.active_children()
    )


def _of_process(number):
    with open(f"/proc/{number}/stat") as file:
        # Its name may hold blanks: what follows counts from the third field.
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait_for_quiet():
    """Until nobody reads ahead any more."""
    busy = None
    while busy is None or _processor() - busy > 0.01:
        busy = _processor()
        time.sleep(0.1)


def _epoch(batches):
    """Microseconds of a record: on the clock, and of the processor."""
    _wait_for_quiet()
    begin, busy = time.perf_counter(), _processor()
    count = 0
    for batch in batches():
        count += len(tf.nest.flatten(batch)[0])
    seconds, busy = time.perf_counter() - begin, _processor() - busy
    if count != NUM_RECORDS.value:
        raise ValueError(f"{count} records of {NUM_RECORDS.value}")
    return 1e6 * seconds / count, 1e6 * busy / count


def _run(task, contestants):
    times = {name: [] for name in contestants}
    for number in range(NUM_ROUNDS.value + 1):
        names = list(contestants)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            measured = _epoch(contestants[name])
            if number:  # the first round warms up, and fills caches
                times[name].append(measured)
    print(f"\n{task}: microseconds a record (lowest, highest); tfscale over it")
    for name, measured in times.items():
        clock, busy = zip(*measured, strict=True)
        ratios = [
            statistics.median(
                a[kind] / b[kind]
                for a, b in zip(measured, times["tfscale"], strict=True)
            )
            for kind in (0, 1)
        ]
        print(
            f"  {name:28} clock {statistics.median(clock):7.2f} "
            f"({min(clock):.2f} {max(clock):.2f})  processor "
            f"{statistics.median(busy):7.2f} ({min(busy):.2f} {max(busy):.2f})"
            f"  {ratios[0]:6.2f} {ratios[1]:6.2f}"
        )


def main(_):
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}, TensorFlow {tf.__version__}, NumPy "
        f"{np.__version__}; {NUM_RECORDS.value} records, {NUM_ROUNDS.value} "
        "rounds"
    )
    with tempfile.TemporaryDirectory() as folder:
        for task, make in small_contestants.TASKS.items():
            if re.search(ONLY.value, task):
                contestants = make(folder, NUM_RECORDS.value)
                if PEERS.value:
                    from benchmarks.input_pipeline import small_peers

                    if peers := small_peers.TASKS.get(task):
                        contestants.update(peers(folder, NUM_RECORDS.value))
                _run(task, contestants)


if __name__ == "__main__":
    app.run(main)
