"""A real dispatcher and real workers, in processes of their own."""

import os
import socket
import subprocess
import threading
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tfscale import data
from tfscale.data.chain import service

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
        [forked_python.executable(), "-c", _SERVER, *arguments],
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
    @pytest.mark.crossing(every=3)
    def test_same_batches_in_the_same_order_and_resume(self, name):
        source, parse = self._sources()[name]
        kwargs = {"batch_size": 4, "parse": parse, "augment": _augment}
        alone = data.pipeline(source, cache="none", **kwargs)
        # More lanes than workers; each of them is a chain to be started.
        with mock.patch.object(service, "LANES", 3):
            served = data.pipeline(source, service=self.address, **kwargs)
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
        processes = set()
        for _ in range(30):
            # On a busy machine one may have done all before others begin.
            processes |= {pid.numpy()[0] for _, pid in served}
            if len(processes) > 1:
                break
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

    @parameterized.parameters("localhost:5000", "grpc://localhost", "")
    def test_what_is_no_address_is_refused(self, address):
        with self.assertRaisesRegex(ValueError, f"host:5000.*'{address}'"):
            data.pipeline(data.arrays([1]), batch_size=1, service=address)

    def test_a_service_that_is_not_there_is_named(self):
        # tf.data would wait for it for ever.
        with socket.socket() as taken:
            taken.bind(("localhost", 0))  # does not listen
            address = f"grpc://localhost:{taken.getsockname()[1]}"
            with self.assertRaisesRegex(ConnectionError, address):
                service.reach(address, patience=0.5)

    def test_a_service_that_comes_late_is_waited_for(self):
        with socket.socket() as late:
            late.bind(("localhost", 0))
            timer = threading.Timer(0.5, late.listen)
            timer.start()
            service.reach(f"grpc://localhost:{late.getsockname()[1]}")
            timer.join()


if __name__ == "__main__":
    absltest.main()
