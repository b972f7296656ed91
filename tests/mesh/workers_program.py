"""Trains in real worker processes, and writes down what came out.

    python -m tests.mesh.workers_program FOLDER

To look at one row or case, add its name, and with COUNT=2 the other numbers of
workers are left out.

It imports TensorFlow once, and becomes each worker by a fork before TensorFlow
has started: importing it takes longer than all that workers do.
"""

import contextlib
import os
import pickle
import sys
import time
import traceback
import warnings
from unittest import mock

import keras
import tensorflow as tf

import tfscale
from tests import forked_processes
from tests import same_numbers
from tests.executed_functions import executed_functions
from tests.executed_functions import in_one_order
from tests.executed_functions import largest
from tests.mesh import workers_cases
from tests.mesh import workers_rows
from tfscale.cluster import Cluster
from tfscale.cluster.initialize import joined

_SECONDS = 600


def train(rows, index):
    """The results of all rows; a traceback in place of what failed."""

    def reset():
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1 + index)

    same_numbers.reset = reset
    results = {}
    for name, row in rows.items():
        start = time.monotonic()
        try:
            with (
                counted_collectives() as collectives,
                functions_of(row) as functions,
            ):
                outcome = row.train(row.job)
            found = workers_rows.result(row, outcome)
            found["collectives"] = len(collectives)
            if row.is_compiled:
                step = largest(functions)
                found["order"] = in_one_order(step, "Collective")
                ops = [node.op for graph in step for node in graph.node]
                found["clusters"] = ops.count("_XlaCompile")
        except Exception:
            found = traceback.format_exc()
            print(f"worker {index}: {name}\n{found}", flush=True)
        results[name] = found
        took = time.monotonic() - start
        print(f"worker {index}: {name} {took:.1f} s", flush=True)
    return results


def functions_of(row):
    """The functions that run, where a row looks at them."""
    return executed_functions() if row.is_compiled else contextlib.nullcontext()


@contextlib.contextmanager
def counted_collectives():
    """Gives one item for each collective in a function that is traced."""
    found = []
    plain = tf.raw_ops.CollectiveReduceV2

    def count(**kwargs):
        graph = kwargs["input"].graph if not tf.executing_eagerly() else None
        # Keras tries metrics in a graph that is thrown away.
        if graph is not None and not graph.name.startswith("scratch"):
            found.append(graph.name)
        return plain(**kwargs)

    with mock.patch.object(tf.raw_ops, "CollectiveReduceV2", count):
        yield found


def work(index, count, folder):
    """What worker `index` does."""
    os.environ["TFSCALE_VIRTUAL_DEVICES"] = "2"
    tf.get_logger().setLevel("ERROR")  # of functions that are traced often
    warnings.filterwarnings("error", module="tfscale")
    tfscale.initialize()
    rows = workers_rows.ROWS if count == 2 else workers_rows.SHORT
    results = train(only(rows), index)
    if count == 2:
        cases = {**workers_cases.CASES, **workers_cases.REFUSED}
        results["cases"] = workers_cases.run(index, folder, only(cases))
    with open(os.path.join(folder, f"{count}_{index}"), "wb") as file:
        pickle.dump(results, file)
    # As at the end of a program, which a fork has not.
    joined().coordination.leave(joined().failure_detector.is_missed)


def only(rows):
    """Those named behind the folder, if any are."""
    names = sys.argv[2:] or list(rows)
    return {name: row for name, row in rows.items() if name in names}


def start(index, addresses, folder):
    """Forks a worker; returns its process id."""

    def begin():
        cluster = Cluster({"worker": addresses}, "worker", index)
        os.environ["TF_CONFIG"] = cluster.to_tf_config()
        work(index, len(addresses), folder)

    return forked_processes.fork(begin)


def run(count, folder):
    """Runs so many workers to their end; returns whether all ended well."""
    addresses = forked_processes.free_addresses(count)
    children = {start(i, addresses, folder) for i in range(count)}
    end = time.monotonic() + _SECONDS
    failed = False
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            children.discard(pid)
            failed |= status != 0
        if failed or time.monotonic() > end:
            forked_processes.kill(children)
            return False
        time.sleep(0.02)
    return True


def main():
    folder = sys.argv[1]
    counts = [int(os.environ["COUNT"])] if "COUNT" in os.environ else [2, 4]
    if not all(run(count, folder) for count in counts):
        sys.exit("A worker has failed, or took too long.")


if __name__ == "__main__":
    main()
