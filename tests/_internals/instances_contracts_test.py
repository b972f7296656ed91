"""Keras keeps what an object has where Python does, and copies can differ."""

import keras
import tensorflow as tf

from tfscale._internals import instances


class InstancesTest(tf.test.TestCase):
    def test_all_that_an_object_holds_is_found(self):
        layer = keras.layers.Dense(2)
        layer.one, layer.more = tf.Variable(1), [tf.Variable(2)]
        layer.named = {"a": tf.Variable(3)}
        held = {id(value) for value in instances.held_by(layer)}
        mine = (layer.one, layer.more[0], layer.named["a"])
        self.assertContainsSubset(map(id, mine), held)
        self.assertEqual(instances.attributes_of(layer)["units"], 2)
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile("sgd", "mse")
        self.assertTrue(
            any(v is model.optimizer for v in instances.held_by(model))
        )

    def test_an_operation_is_told_by_its_attributes(self):
        x = keras.Input((3,))
        (one, *_), (other, *_) = (
            keras.Model(x, keras.ops.sum(x, axis=axis)).operations[1:]
            for axis in (0, 1)
        )
        found = [instances.attributes_of(op)["axis"] for op in (one, other)]
        self.assertEqual(found, [[0], [1]])

    def test_a_copy_calls_with_what_was_altered(self):
        layer = keras.layers.Dense(2, kernel_initializer="ones")
        x = tf.constant([[-1.0]])
        self.assertAllEqual(layer(x), [[-1.0, -1.0]])
        other = instances.altered(layer, activation=keras.activations.relu)
        self.assertAllEqual(layer.__class__.call(other, x), [[0.0, 0.0]])
        self.assertIs(other.kernel, layer.kernel)
        self.assertAllEqual(layer(x), [[-1.0, -1.0]])

    def test_a_view_has_the_state_and_other_methods(self):
        loss = keras.losses.MeanSquaredError(reduction="sum")
        view = instances.view(loss, call=lambda self, y, p: y - p)
        y, p = tf.constant([3.0]), tf.constant([1.0])
        self.assertAllEqual((view(y, p), loss(y, p)), (2.0, 4.0))
        self.assertIsInstance(view, keras.losses.MeanSquaredError)
        loss.reduction = "none"
        self.assertEqual(view.reduction, "none")


if __name__ == "__main__":
    tf.test.main()
