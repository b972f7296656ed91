"""Bytes of tensors that are there at once."""

import tensorflow as tf

from tfscale.graphs import memory

KIB = 256  # numbers of float32


def peak(function, *sizes):
    specs = [tf.TensorSpec([size], tf.float32) for size in sizes]
    graph = tf.function(function, autograph=False).get_concrete_function(*specs)
    return memory.peak_bytes(graph.outputs[:1]) / 1024


class PeakBytesTest(tf.test.TestCase):
    def test_a_buffer_is_freed_after_its_last_use(self):
        # Of a chain two tensors are there at once, of 8 KiB and of 4.
        def chain(x):
            x = tf.concat([tf.exp(x), x], 0)
            return tf.sin(tf.cos(x)[: 4 * KIB])

        self.assertEqual(peak(chain, 4 * KIB), 16)

    def test_one_that_is_used_later_stays(self):
        def residual(x):
            first = tf.exp(x)
            return first + tf.cos(tf.sin(first))

        self.assertEqual(peak(residual, KIB), 3)

    def test_a_reshaped_tensor_is_the_same_buffer(self):
        def reshaped(x):
            first = tf.exp(x)
            same = tf.reshape(first, [2, -1])
            return tf.reduce_sum(same) + tf.reduce_sum(first)

        self.assertLess(peak(reshaped, KIB), 1.1)

    def test_what_nobody_needs_does_not_count(self):
        def with_more(x):
            tf.tile(x, [9])
            return tf.exp(x)

        self.assertEqual(peak(with_more, KIB), 1)

    def test_an_unknown_size_is_that_of_the_largest_argument(self):
        def some(x):
            first = tf.exp(x)
            return tf.boolean_mask(first, first > 2.0)

        self.assertGreaterEqual(peak(some, KIB), 2)

    def test_what_a_loop_keeps_is_not_known(self):
        def loop(x):
            list_ = tf.TensorArray(tf.float32, 3)
            _, list_ = tf.while_loop(
                lambda i, _: i < 3,
                lambda i, list_: (i + 1, list_.write(i, x)),
                (0, list_),
            )
            return list_.stack()

        with self.assertRaisesRegex(ValueError, "variant"):
            peak(loop, KIB)


if __name__ == "__main__":
    tf.test.main()
