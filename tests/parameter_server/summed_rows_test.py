"""What an optimizer reads in a step on a worker."""

import collections

import keras
import tensorflow as tf
from absl.testing import absltest

from tfscale.adapters.row_optimizer import adapt_row_optimizer


class SummedRowsTest(absltest.TestCase):
    def test_learning_rate_and_iterations_are_read_once(self):
        # For each variable they came from one server, and went to another.
        variables = [keras.Variable(tf.ones((2,))) for _ in range(3)]
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(variables)
        adapt_row_optimizer(optimizer)

        @tf.function
        def step():
            optimizer.apply([tf.ones((2,))] * 3, variables)

        graph = step.get_concrete_function().graph
        captured = {id(inner): outer for outer, inner in graph.captures}
        reads = collections.Counter(
            id(captured[id(op.inputs[0])])
            for op in graph.get_operations()
            if op.type == "ReadVariableOp"
        )
        rate, iterations = optimizer.learning_rate, optimizer.iterations
        self.assertEqual(reads[id(rate.value.handle)], 1)
        # And once more, to count the step.
        self.assertEqual(reads[id(iterations.value.handle)], 2)
        before = [v.numpy() for v in variables]
        step()
        for variable, value in zip(variables, before):
            self.assertLess(variable.numpy().max(), value.min())


if __name__ == "__main__":
    absltest.main()
