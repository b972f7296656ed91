"""What backups rely on in the function that Keras traces a step to."""

import keras
import numpy as np
import tensorflow as tf

from tests._internals.contracts import holds
from tfscale._internals import attributes

X = np.ones((4, 2), "float32")


class TracedStepsTest(tf.test.TestCase):
    @holds("Model._make_function", "one_step_on_data")
    @holds("polymorphic_function.Function", "_list_all_concrete_functions")
    @holds("FuncGraph.__init__", "_weak_variables")
    def test_a_step_knows_the_variables_that_it_uses(self):
        used, other = tf.Variable(1.0), tf.Variable(1.0)

        def loss(y, p):
            used.assign_add(1.0)
            return keras.ops.mean(keras.ops.abs(y - p)) * used

        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", loss)
        self.assertIsNone(attributes.step_function(model.train_function))
        model.fit(X, X[:, :1], verbose=0)
        function = attributes.step_function(model.train_function)
        (concrete,) = attributes.concrete_functions(function)
        found = list(attributes.variables_used_by(concrete))
        self.assertTrue(any(each is used for each in found))
        self.assertFalse(any(each is other for each in found))

    def test_a_captured_iterator_is_known_by_its_handle(self):
        iterator = iter(tf.data.Dataset.range(2))
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
        variable = tf.Variable(1)

        @tf.function
        def step():
            key = next(iterator)
            return table.lookup(key) + tf.cast(variable, tf.int64)

        captured = step.get_concrete_function().graph.external_captures
        found = [
            tensor for tensor in captured if attributes.is_iterator(tensor)
        ]
        self.assertLen(captured, 4)  # and the value that a table has not
        self.assertLen(found, 1)

    @holds("BaseResourceVariable.__init__", "_unique_id")
    def test_variables_are_numbered_as_they_are_created(self):
        numbers = [
            attributes.creation_number(tf.Variable(0.0, name=name))
            for name in ("b_2", "a", "a")
        ]
        self.assertEqual(numbers, sorted(set(numbers)))

    def test_a_component_leads_to_the_variable_of_its_strategy(self):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            whole = tf.Variable(0.0)
        self.assertIs(attributes.whole_of(whole.values[0]), whole)
        plain = tf.Variable(0.0)
        self.assertIs(attributes.whole_of(plain), plain)


if __name__ == "__main__":
    tf.test.main()
