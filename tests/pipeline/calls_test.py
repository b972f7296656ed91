"""A function called as one node: its results, its errors, its device."""

import tensorflow as tf
from absl.testing import absltest

from tfscale.pipeline.calls import call_as_one_node
from tfscale.pipeline.grappler import no_grappler

VECTOR = tf.TensorSpec([2], tf.float32)


def function(body):
    """A concrete function of one vector."""
    return tf.function(body, autograph=False).get_concrete_function(VECTOR)


class CallsTest(absltest.TestCase):
    def test_it_is_one_node_and_has_the_results_of_the_function(self):
        squares = function(lambda x: [x * x, tf.reduce_sum(x)])

        @tf.function(autograph=False)
        def call(x):
            return call_as_one_node(squares, x)

        square, total = call(tf.constant([2.0, 3.0]))
        self.assertEqual(square.numpy().tolist(), [4.0, 9.0])
        self.assertEqual(float(total), 5.0)
        graph = call.get_concrete_function(VECTOR).graph
        types = [operation.type for operation in graph.get_operations()]
        self.assertEqual(types.count("StatelessCase"), 1)
        self.assertNotIn("Mul", types)
        self.assertEqual(graph.outputs[0].shape, [2])

    def test_what_the_function_captures_comes_along(self):
        variable = tf.Variable(3.0)
        times = function(lambda x: [x * variable])

        @tf.function(autograph=False)
        def call(x):
            return call_as_one_node(times, x)

        for factor in (3.0, 5.0):
            variable.assign(factor)
            (result,) = call(tf.ones([2]))
            self.assertEqual(result.numpy().tolist(), [factor] * 2)

    def test_an_error_keeps_its_name_though_another_device_waits(self):
        def guard(x):
            with tf.name_scope("the_guard"):
                check = tf.debugging.assert_non_negative(x, "a negative number")
            with tf.control_dependencies([check]):
                return [tf.identity(x)]

        guarded = function(guard)
        _, first, second, *_ = tf.config.list_logical_devices("CPU")

        @tf.function(autograph=False)
        def call(x):
            with tf.device(first.name):
                y = tf.tanh(x)
            # Both devices wait for the other one when it fails.
            with tf.device(second.name):
                (z,) = call_as_one_node(guarded, y)
                again = tf.exp(y)
            with tf.device(first.name):
                z = tf.tanh(z) + again
            with tf.device(second.name):
                return tf.exp(z)

        for _ in range(20):
            with no_grappler():
                call(tf.ones([2]))
                with self.assertRaisesRegex(
                    tf.errors.InvalidArgumentError,
                    "(?s)the_guard.*a negative number",
                ):
                    call(-tf.ones([2]))


if __name__ == "__main__":
    absltest.main()
