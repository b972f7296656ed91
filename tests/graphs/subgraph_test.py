"""Operations that are cut out of a graph compute what they did there."""

import tensorflow as tf

from tfscale.graphs.subgraph import extract


class SubgraphTest(tf.test.TestCase):
    def test_an_operation_is_no_feed_whatever_its_name(self):
        # An input was dropped if the name of a feed followed its first letter,
        # as if it were a control input, "^feed_0".
        with tf.Graph().as_default() as graph:
            x = tf.compat.v1.placeholder(tf.float32, [])
            doubled = tf.multiply(x, 2.0, name="afeed_0")
            with tf.control_dependencies([x]):
                result = doubled + x
            subgraph = extract(
                [doubled.op, result.op], [x], [result], [], graph.as_graph_def()
            )
        self.assertEqual(subgraph.feeds, ("feed_0",))

        @tf.function(autograph=False)
        def run(x):
            return subgraph.run({"feed_0": x})

        self.assertAllEqual(run(tf.constant(3.0)), [9.0])


if __name__ == "__main__":
    tf.test.main()
