import time

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfscale.throughput.arrivals import Arrivals


class ArrivalsTest(tf.test.TestCase, parameterized.TestCase):
    def test_the_batches_are_the_same(self):
        dataset = tf.data.Dataset.range(5).batch(2)
        arrivals = Arrivals(dataset.element_spec)
        noted = arrivals.noting(dataset)
        self.assertEqual(noted.cardinality(), 3)
        self.assertEqual(noted.element_spec, dataset.element_spec)
        for one, other in zip(dataset, noted, strict=True):
            self.assertAllEqual(one, other)

    def test_batches_are_noted(self):
        x = tf.data.Dataset.from_tensor_slices(np.ones((10, 3), "int32"))
        dataset = tf.data.Dataset.zip(x, x).batch(4)
        arrivals = Arrivals(dataset.element_spec)
        noted = arrivals.noting(dataset)
        for iterator in (1, 2):
            before = time.time()
            arrivals.begin_iterator()
            self.assertLen(list(noted), 3)
            found = [arrivals.read()(iterator, n) for n in range(3)]
            self.assertEqual([each.rows for each in found], [4, 4, 2])
            self.assertEqual([each.tokens for each in found], [12, 12, 6])
            self.assertEqual(found[0].shape, found[1].shape)
            self.assertNotEqual(found[1].shape, found[2].shape)
            for each in found:
                self.assertBetween(each.time, before, time.time())
            self.assertIsNone(arrivals.read()(iterator, 3))
            self.assertIsNone(arrivals.read()(iterator + 1, 0))

    def test_only_the_last_batches_are_kept(self):
        dataset = tf.data.Dataset.range(2000).batch(1)
        arrivals = Arrivals(dataset.element_spec)
        arrivals.begin_iterator()
        self.assertLen(list(arrivals.noting(dataset)), 2000)
        self.assertIsNone(arrivals.read()(1, 900))
        self.assertEqual(arrivals.read()(1, 1000).rows, 1)

    @parameterized.parameters(
        ("int32", (4, 7), 28),
        ("uint8", (4, 7), 28),
        ("float32", (4, 7), 0),
        ("int32", (4,), 0),
        ("int32", (4, 7, 2), 0),
    )
    def test_tokens_are_integers_of_a_batch_and_a_length(
        self, dtype, shape, tokens
    ):
        x = tf.ones(shape, dtype)
        dataset = tf.data.Dataset.from_tensors(({"a": x}, x))
        arrivals = Arrivals(dataset.element_spec)
        arrivals.begin_iterator()
        list(arrivals.noting(dataset))
        found = arrivals.read()(1, 0)
        self.assertEqual((found.rows, found.tokens), (4, tokens))

    def test_ragged_and_sparse_inputs_have_rows(self):
        for x in (
            tf.ragged.constant([[1], [2, 3], []]),
            tf.sparse.from_dense([[1], [2], [0]]),
        ):
            dataset = tf.data.Dataset.from_tensors((x, tf.ones(3)))
            arrivals = Arrivals(dataset.element_spec)
            arrivals.begin_iterator()
            list(arrivals.noting(dataset))
            self.assertEqual(arrivals.read()(1, 0).rows, 3)

    def test_data_without_rows_is_refused(self):
        dataset = tf.data.Dataset.range(4)
        with self.assertRaisesRegex(ValueError, "batch"):
            Arrivals(dataset.element_spec)


if __name__ == "__main__":
    tf.test.main()
