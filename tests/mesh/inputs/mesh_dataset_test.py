"""Replicas on CPUs take batches from one ordinary iterator, in their order.

TensorFlow's iterator for several devices made glibc map memory anew for each
buffer, for as long as the process lived.
"""

import itertools
import threading

import tensorflow as tf

import tfscale
from tfscale._internals import datasets


def rows_of(value):
    return [part.numpy().tolist() for part in value.values]


def distributed(strategy, num_rows, **kwargs):
    return strategy.experimental_distribute_dataset(
        tf.data.Dataset.range(num_rows).batch(6, **kwargs)
    )


class ReleaseTest(tf.test.TestCase):
    def test_does_not_wait_for_the_end_of_an_iterator(self):
        # tf.data's autotuner sleeps through it, for up to a minute.
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=2))
        has_continued, ends = threading.Event(), []

        def records():
            try:
                yield from itertools.count()
            finally:
                ends.append(has_continued.wait(timeout=20))

        data = tf.data.Dataset.from_generator(
            records, output_signature=tf.TensorSpec((), tf.int64)
        ).batch(2)
        iterator = iter(strategy.experimental_distribute_dataset(data))
        self.assertEqual(rows_of(next(iterator)), [[0], [1]])
        before = set(threading.enumerate())
        del iterator
        has_continued.set()
        for thread in set(threading.enumerate()) - before:
            thread.join()
        self.assertEqual(ends, [True])


class InTurnTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=3))

    def test_also_those_of_a_function_that_takes_many_steps(self):
        data = distributed(self.strategy, 36, drop_remainder=True)
        expected = [
            [[6 * s, 6 * s + 1], [6 * s + 2, 6 * s + 3], [6 * s + 4, 6 * s + 5]]
            for s in range(6)
        ]
        self.assertEqual([rows_of(step) for step in data], expected)

        @tf.function
        def take(iterator):
            first = [next(iterator).values, next(iterator).values]
            found = tf.TensorArray(tf.int64, 4)
            for i in tf.range(4):
                found = found.write(i, tf.stack(next(iterator).values))
            return tf.concat([tf.stack(first), found.stack()], 0)

        iterator = iter(data)
        self.assertAllEqual(take(iterator), expected)
        with self.assertRaises(tf.errors.OutOfRangeError):
            take(iterator)

    def test_a_last_batch_that_is_too_small_for_all(self):
        data = distributed(self.strategy, 8)
        expected = [[[0, 1], [2, 3], [4, 5]], [[6], [7], []]]
        self.assertEqual([rows_of(step) for step in data], expected)

        @tf.function
        def take(iterator):
            optional = iterator.get_next_as_optional()
            if optional.has_value():
                return tf.concat(optional.get_value().values, 0)
            return tf.constant([-1], tf.int64)

        iterator = iter(data)
        for rows in ([0, 1, 2, 3, 4, 5], [6, 7], [-1]):
            self.assertAllEqual(take(iterator), rows)

    def test_datasets_of_a_function_have_the_batches_of_replicas(self):
        contexts = []

        def make(context):
            contexts.append(context)
            return tf.data.Dataset.range(8).batch(2)

        data = self.strategy.distribute_datasets_from_function(make)
        self.assertEqual(contexts[0].num_replicas_in_sync, 3)
        expected = [[[0, 1], [2, 3], [4, 5]], [[6, 7], [], []]]
        self.assertEqual([rows_of(step) for step in data], expected)
        self.assertEqual(data.cardinality, 2)

    def test_a_function_is_handed_one_iterator(self):
        for made in (
            distributed(self.strategy, 6),
            self.strategy.distribute_datasets_from_function(
                lambda _: tf.data.Dataset.range(3).batch(1)
            ),
        ):
            iterator = iter(made)
            flat = tf.nest.flatten(iterator, expand_composites=True)
            self.assertLen(flat, 1)
            again = tf.nest.pack_sequence_as(
                iterator, flat, expand_composites=True
            )
            self.assertLen(next(again).values, 3)

    def test_options_of_a_user_are_those_of_tensorflow(self):
        dataset = tf.data.Dataset.range(6).batch(6)
        with self.assertRaisesRegex(NotImplementedError, "PER_REPLICA"):
            self.strategy.experimental_distribute_dataset(
                dataset, datasets.ORDINARY_ITERATOR
            )
        data = self.strategy.experimental_distribute_dataset(
            dataset, tf.distribute.InputOptions()
        )
        self.assertEqual(
            [rows_of(step) for step in data], [[[0, 1], [2, 3], [4, 5]]]
        )


if __name__ == "__main__":
    tf.test.main()
