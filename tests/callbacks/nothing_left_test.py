"""A `fit` leaves no more than one of Keras alone, until memory is collected.

Each left a cycle, and with it the threads of TensorFlow's iterator: 94 after
300 fits. One that accumulates was traced anew, which memory it never got back.
"""

import collections
import gc
import os
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tfscale.callbacks import BackupAndRestore
from tfscale.callbacks import GradientAccumulation
from tfscale.callbacks import Throughput

X, Y = np.ones((40, 4), "float32"), np.ones((40, 1), "float32")
NUM_FITS = 3


class NothingLeftTest(tf.test.TestCase, parameterized.TestCase):
    def backup(self):
        return BackupAndRestore(self.path, save_freq=2)

    def accumulation(self):
        return GradientAccumulation(2)

    def throughput(self):
        return Throughput(peak_tflops=1.0)

    def setUp(self):
        super().setUp()
        self.path = self.create_tempdir().full_path
        keras.utils.set_random_seed(0)
        self.model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(1)]
        )
        self.model.compile("sgd", "mse", jit_compile=False)
        self.addCleanup(gc.enable)

    def fit(self, *makers):
        self.model.fit(
            *(X, Y),
            batch_size=8,
            validation_data=(X, Y),
            verbose=0,
            callbacks=[make() for make in makers],
        )

    def left(self, *makers):
        """Objects that fits leave to the collector, by type; and threads."""
        for _ in range(2):  # what is kept is made
            self.fit(*makers)
        gc.collect()
        gc.disable()
        before, threads = self.alive(), self.threads()
        for _ in range(NUM_FITS):
            self.fit(*makers)
        after, threads = self.alive() - before, self.threads() - threads
        gc.enable()
        return after, threads

    def alive(self):
        return collections.Counter(type(o).__name__ for o in gc.get_objects())

    def threads(self):
        return len(os.listdir("/proc/self/task"))

    @parameterized.parameters(
        ("accumulation", "backup"),
        ("backup",),
        ("accumulation",),
    )
    @pytest.mark.crossing(every=3)
    def test_no_more_than_without_it(self, *names):
        plain, _ = self.left()
        left, threads = self.left(*(getattr(self, name) for name in names))
        more = left - plain
        for kind in list(more):  # one more is not one of each fit
            if more[kind] < NUM_FITS:
                del more[kind]
        self.assertEmpty(more)
        self.assertLessEqual(threads, 0)

    @pytest.mark.crossing
    def test_the_collector_finds_all_of_throughput(self):
        # A function of a dataset is a cycle, which TensorFlow leaves to it.
        def alive():
            gc.collect()
            return self.alive()["FuncGraph"], self.threads()

        for _ in range(2):
            self.fit(self.throughput)
        graphs, threads = alive()
        for _ in range(NUM_FITS):
            self.fit(self.throughput)
        more_graphs, more_threads = alive()
        self.assertLessEqual(more_graphs, graphs)
        self.assertLessEqual(more_threads, threads)

    def test_one_thread_writes_for_all_fits(self):
        for _ in range(NUM_FITS):
            self.fit(self.backup)
        writing = [t for t in threading.enumerate() if "backup" in t.name]
        self.assertLen(writing, 1)

    @pytest.mark.crossing
    def test_a_step_that_accumulates_is_traced_once(self):
        traced = []

        class Layer(keras.layers.Dense):
            def call(self, x):
                traced.append(x)
                return super().call(x)

        self.model = keras.Sequential([keras.Input((4,)), Layer(1)])
        self.model.compile("sgd", "mse")
        self.fit(self.accumulation)
        count = len(traced)
        self.fit(self.accumulation)
        self.assertLen(traced, count)
        # With another number, and after it is compiled, it is another one.
        self.fit(lambda: GradientAccumulation(4))
        self.assertGreater(len(traced), count)
        count = len(traced)
        self.model.compile("sgd", "mae")
        self.fit(lambda: GradientAccumulation(4))
        self.assertGreater(len(traced), count)


if __name__ == "__main__":
    tf.test.main()
