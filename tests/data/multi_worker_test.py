"""Workers in processes of their own, each reading its own files."""

import json
import os
import subprocess
import tempfile

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_processes
from tests import forked_python

_NUM_WORKERS = 2
_RECORDS = (13, 4, 9, 11)  # of each file: workers have unequal shares

# Prints for each epoch and step this worker's records and the sum over all
# workers, which only comes if they are in the same step.
_WORKER = """
import json
import sys
import tensorflow as tf
from tfscale import data

strategy = tf.distribute.MultiWorkerMirroredStrategy()

def parse(record):
    number = tf.strings.to_number(record, tf.int64)
    return number, number

def pipelines(remainder):
    def make(context):
        return data.pipeline(
            data.tfrecords(sys.argv[1]),
            parse=parse,
            batch_size=8,
            remainder=remainder,
            input_context=context,
            shard="files",
        )
    return strategy.distribute_datasets_from_function(make)

@tf.function
def count(number, *rest):
    weight = rest[1] if len(rest) > 1 else tf.ones(tf.shape(number))
    context = tf.distribute.get_replica_context()
    return context.all_reduce("SUM", tf.reduce_sum(weight))

def read(batches):
    steps = []
    for batch in batches:
        total = strategy.run(count, args=batch)
        number, _, *weight = [
            strategy.experimental_local_results(part)[0] for part in batch
        ]
        real = weight[0] if weight else tf.ones(tf.shape(number))
        total = strategy.experimental_local_results(total)[0]
        steps.append(
            [number[real > 0].numpy().tolist(), len(number), float(total)]
        )
    return steps

read_by = {}
for remainder in ("pad", "drop"):
    batches = pipelines(remainder)
    read_by[remainder] = [read(batches), read(batches)]
print(json.dumps(read_by))
"""


class MultiWorkerTest(tf.test.TestCase, parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        record = iter(range(sum(_RECORDS)))
        cls.records = []
        for number, size in enumerate(_RECORDS):
            cls.records.append([next(record) for _ in range(size)])
            path = os.path.join(folder, f"{number}.tfrecord")
            with tf.io.TFRecordWriter(path) as writer:
                for value in cls.records[-1]:
                    writer.write(str(value).encode())
        cls.workers = cls._run(os.path.join(folder, "*.tfrecord"))

    @classmethod
    def _run(cls, pattern):
        """What each worker has read: by remainder, epochs of steps."""
        addresses = forked_processes.free_addresses(_NUM_WORKERS)
        cluster = {"worker": addresses}
        processes = []
        for index in range(_NUM_WORKERS):
            task = {"type": "worker", "index": index}
            config = json.dumps({"cluster": cluster, "task": task})
            process = subprocess.Popen(
                [forked_python.executable(), "-c", _WORKER, pattern],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "TF_CONFIG": config},
            )
            cls.addClassCleanup(process.communicate)
            cls.addClassCleanup(process.kill)
            processes.append(process)
        results = []
        for process in processes:
            out, error = process.communicate()
            if process.returncode:
                raise RuntimeError(error)
            results.append(json.loads(out.splitlines()[-1]))
        return results

    @parameterized.parameters("pad", "drop")
    @pytest.mark.crossing(every=2)
    def test_each_reads_its_own_files_and_all_are_read_once(self, remainder):
        workers = [worker[remainder] for worker in self.workers]
        for epoch in zip(*workers, strict=True):
            seen = []
            for worker, steps in enumerate(epoch):
                own = np.concatenate([numbers for numbers, _, _ in steps])
                files = self.records[worker::_NUM_WORKERS]
                expected = [value for file in files for value in file]
                if remainder == "pad":
                    self.assertCountEqual(own.tolist(), expected)
                else:
                    self.assertContainsSubset(own.tolist(), expected)
                self.assertEqual({size for _, size, _ in steps}, {4})
                seen += own.tolist()
            self.assertLen(set(seen), len(seen))
            # Whoever has fewer records decides or is padded: equal steps.
            one, other = epoch
            self.assertLen(one, 6 if remainder == "pad" else 3)
            for (mine, _, total), (theirs, _, same) in zip(
                one, other, strict=True
            ):
                self.assertEqual(total, len(mine) + len(theirs))
                self.assertEqual(total, same)
        # Another order in the second epoch.
        for first, second in workers:
            self.assertNotEqual(first, second)


if __name__ == "__main__":
    absltest.main()
