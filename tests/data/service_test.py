"""A real dispatcher and real workers, in processes of their own."""

import os
import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale import data

_SERVER = """
import sys
import tensorflow as tf
service = tf.data.experimental.service
if sys.argv[1] == "dispatcher":
    server = service.DispatchServer(service.DispatcherConfig(port=0))
    print(server.target.split("://")[1], flush=True)
else:
    server = service.WorkerServer(
        service.WorkerConfig(dispatcher_address=sys.argv[2], port=0)
    )
    print("ready", flush=True)
sys.stdin.read()  # until the parent goes
"""

_NUM_WORKERS = 2


def _start(*arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    return process, process.stdout.readline().strip()


def _augment(number, seed):
    return number, tf.random.stateless_uniform([], seed)


class ServiceTest(tf.test.TestCase, parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        dispatcher, address = _start("dispatcher")
        cls.address = f"grpc://{address}"
        cls.processes = [dispatcher]
        for _ in range(_NUM_WORKERS):
            worker, _ = _start("worker", address)
            cls.processes.append(worker)

    @classmethod
    def tearDownClass(cls):
        for process in reversed(cls.processes):
            process.kill()
            process.communicate()
        super().tearDownClass()

    def _sources(self):
        path = os.path.join(self.create_tempdir(), "0.tfrecord")
        with tf.io.TFRecordWriter(path) as writer:
            for number in range(50):
                writer.write(str(number).encode())
        return {
            "arrays": (data.arrays(np.arange(50)), lambda x: x),
            "tfrecords": (
                data.tfrecords(path),
                lambda r: tf.strings.to_number(r, tf.int64),
            ),
            "dataset": (
                data.dataset(tf.data.Dataset.range(50)),
                lambda x: x,
            ),
        }

    @parameterized.parameters("arrays", "tfrecords", "dataset")
    def test_same_batches_in_the_same_order_and_resume(self, name):
        source, parse = self._sources()[name]
        kwargs = {"batch_size": 4, "parse": parse, "augment": _augment}
        alone = data.pipeline(source, cache="none", **kwargs)
        # More lanes than workers; each of them is a chain to be started.
        served = data.pipeline(
            source, service=self.address, service_lanes=3, **kwargs
        )
        self.assertEqual(served.cardinality(), 13)
        for epoch, index in ((0, 0), (1, 0), (0, 20)):
            for pipeline in (alone, served):
                pipeline.position.assign(epoch=epoch, index=index)
            for one, other in zip(alone, served, strict=True):
                keras.tree.map_structure(self.assertAllEqual, one, other)
        self.assertEqual(served.position.value, (0, 1, 0))

    def test_more_than_one_worker_takes_part(self):
        source = data.arrays(np.arange(64))

        def parse(number):
            # The worker's process, by what Linux says of whoever reads it.
            stat = tf.io.read_file("/proc/self/stat")
            return number, tf.strings.split(stat)[0]

        served = data.pipeline(
            source, batch_size=1, parse=parse, service=self.address
        )
        processes = {pid.numpy()[0] for _, pid in served}
        own = str(os.getpid()).encode()
        self.assertNotIn(own, processes)
        self.assertLen(processes, _NUM_WORKERS)

    def test_fit_takes_it(self):
        rows = np.ones([32, 4], "float32")
        served = data.pipeline(
            data.arrays(rows, rows), batch_size=8, service=self.address
        )
        model = keras.Sequential([keras.layers.Dense(4)])
        model.compile("sgd", "mse")
        model.fit(served, epochs=2, verbose=0)
        self.assertEqual(model.optimizer.iterations, 8)

    def test_a_memory_cache_is_refused(self):
        with self.assertRaisesRegex(ValueError, "cache='file'"):
            data.pipeline(
                data.arrays(np.arange(9)),
                batch_size=3,
                parse=lambda x: x,
                cache="memory",
                service=self.address,
            )


if __name__ == "__main__":
    absltest.main()
