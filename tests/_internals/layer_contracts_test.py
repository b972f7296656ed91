"""What tfscale relies on in layers, models and variables of Keras."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests._internals.contracts import holds
from tfscale._internals import attributes
from tfscale._internals import releases
from tfscale._internals import symbols


class Outer(keras.layers.Layer):
    """With a variable of its own, a generator and a layer below."""

    def __init__(self, note=lambda: None):
        super().__init__()
        self.note = note
        self.dense = keras.layers.Dense(2)
        self.seed_generator = keras.random.SeedGenerator(0)

    def build(self, shape):
        self.scale = self.add_weight(shape=(), name="scale")
        self.count = self.add_weight(shape=(), name="count", trainable=False)
        self.dense.build(shape)
        self.note()

    def call(self, x):
        self.add_loss(tf.reduce_sum(x))
        return self.dense(x) * self.scale


class ScopesTest(tf.test.TestCase):
    @holds("global_state", "get_global_attribute")
    @holds("name_scope", "current_path")
    @holds("name_scope.name_scope.__enter__", "name_scope_stack")
    @holds("name_scope.name_scope.__init__", "caller")
    def test_who_makes_a_variable_and_its_path(self):
        found = []

        class Noting(keras.layers.Dense):
            def add_weight(self, *args, **kwargs):
                callers = attributes.name_scope_callers()
                found.append((callers, symbols.current_path()))
                return super().add_weight(*args, **kwargs)

        outer = Outer()
        outer.dense = Noting(2, name="noting")
        outer(tf.zeros((1, 3)))
        callers, path = found[0]
        self.assertEqual(callers, [outer, outer.dense])
        self.assertEqual(f"{path}/kernel", outer.dense.kernel.path)
        self.assertEmpty(attributes.name_scope_callers())

    @holds("global_state", "set_global_attribute")
    @holds("stateless_scope.StatelessScope.__enter__", "stateless_scope")
    def test_variables_are_made_at_once_where_keras_would_wait(self):
        with keras.StatelessScope():
            waits = keras.Variable(lambda *_, **__: tf.ones(()), shape=())
            self.assertIsNone(attributes.value_of(waits))
            with attributes.variables_created_eagerly():
                made = keras.Variable(lambda *_, **__: tf.ones(()), shape=())
                self.assertAllEqual(attributes.value_of(made), 1.0)
            later = keras.Variable(lambda *_, **__: tf.ones(()), shape=())
            self.assertIsNone(attributes.value_of(later))

    @holds("naming.uniquify", "object_name_uids")
    def test_names_that_are_given_are_counted(self):
        names = attributes.automatic_names()
        before = names.get("outer", 0)
        Outer()
        self.assertEqual(names["outer"], before + 1)
        names["outer"] = 7
        self.assertEqual(Outer().name, "outer_7")


class LayerTest(tf.test.TestCase):
    @holds("Layer._initialize_tracker", "_layers")
    def test_layers_below_are_all_found_once(self):
        outer = Outer()
        outer.again = outer.dense
        top = keras.Sequential([keras.Input((3,)), outer])
        self.assertEqual(attributes.flatten_layers(outer), [outer, outer.dense])
        self.assertEqual(attributes.sublayers(outer), [outer.dense])
        self.assertIn(outer.dense, attributes.flatten_layers(top))
        for layer in (outer, top):
            self.assertEqual(
                attributes.flatten_layers(layer), list(layer._flatten_layers())
            )
        self.assertEqual(
            attributes.flatten_layers(outer, include_self=False), [outer.dense]
        )

    def test_what_is_a_layers_own_is_not_of_those_below(self):
        outer = Outer()
        outer.build((None, 3))
        self.assertEqual(
            attributes.direct_variables(outer), [outer.scale, outer.count]
        )
        self.assertEqual(
            attributes.direct_generators(outer), [outer.seed_generator]
        )
        self.assertEmpty(attributes.direct_generators(outer.dense))

    @holds("Layer.__init__", "_losses")
    def test_what_is_taken_from_the_list_is_no_loss_any_more(self):
        outer = Outer()
        outer(tf.ones((1, 3)))
        self.assertLen(outer.losses, 1)
        attributes.noted_losses(outer)[:] = []
        self.assertEmpty(outer.losses)


class ModelTest(tf.test.TestCase, parameterized.TestCase):
    def test_a_layer_is_called_as_a_model_calls_it(self):
        self.assertIsInstance(self.model(), attributes.functional_class())
        x = tf.ones((1, 2))
        for given in ({}, {"training": False}, {"training": True}):
            dropout = keras.layers.Dropout(1.0 - 1e-7)
            inputs = keras.Input((2,))
            model = keras.Model(inputs, dropout(inputs, **given))
            for training in (False, True):
                call = releases.called_in_model(dropout, training)
                self.assertAllEqual(
                    call(x, **given), model(x, training=training)
                )
        add = keras.ops.add
        self.assertIs(releases.called_in_model(add, True), add)

    def model(self):
        a, b = keras.Input((2,), name="a"), keras.Input((2,), name="b")
        x = keras.layers.Add(name="add")([a, b])
        return keras.Model({"a": a, "b": b}, [keras.layers.Dense(1)(x), x])

    def test_the_class_of_models_is_known_and_takes_no_automatic_name(self):
        before = dict(attributes.automatic_names())
        attributes.functional_class.cache_clear()
        kind = attributes.functional_class()
        self.assertEqual(attributes.automatic_names(), before)
        self.assertIsInstance(self.model(), kind)
        self.assertNotIsInstance(keras.Sequential(), kind)

    def test_inputs_and_outputs_have_the_structure_that_users_gave(self):
        model = self.model()
        structure = attributes.inputs_structure(model)
        self.assertEqual(list(structure), ["a", "b"])
        self.assertLen(model.output, 2)
        one, two = np.ones((1, 2)), np.zeros((1, 2))
        found = attributes.standardize_inputs(model, {"b": two, "a": one})
        self.assertAllEqual(found[0], one)
        self.assertEqual(found[0].dtype, tf.float32)

    @holds("Function.__init__", "_nodes_by_depth")
    @holds("Node", "input_tensors")
    @holds("Node.__init__", "operation", "arguments", "outputs")
    @holds("SymbolicArguments", "fill_in")
    def test_nodes_are_calls_in_an_order_in_which_they_can_run(self):
        model = self.model()
        values = {
            id(x): tf.fill((1, 2), float(i)) for i, x in enumerate(model.inputs)
        }
        for node in attributes.nodes_of(model):
            if not node.input_tensors:
                continue
            for x in node.input_tensors:
                self.assertIn(id(x), values)
            args, kwargs = node.arguments.fill_in(values)
            (output,) = node.outputs
            values[id(output)] = node.operation(*args, **kwargs)
        found = [values[id(x)] for x in model.outputs]
        self.assertAllEqual(found[1], [[1.0, 1.0]])

    def test_a_sequential_model_has_a_functional_one_inside(self):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        inside = attributes.functional_in(model)
        self.assertIsInstance(inside, attributes.functional_class())
        self.assertIs(inside.layers[-1], model.layers[-1])
        model.add(keras.layers.Dense(1))
        self.assertIsNot(attributes.functional_in(model), inside)
        self.assertIsNone(attributes.functional_in(inside))
        # One that a user keeps beside is not it.
        model = keras.Sequential([keras.layers.Dense(1)])
        model.beside = inside
        self.assertIsNone(attributes.functional_in(model))
        model.build((None, 2))
        found = attributes.functional_in(model)
        self.assertIs(found.inputs, model.inputs)
        self.assertIsNot(found, inside)

    @holds("masking", "get_keras_mask", "set_keras_mask")
    def test_a_mask_that_is_set_is_what_the_next_layer_gets(self):
        found = []

        class Noting(keras.layers.Layer):
            supports_masking = True

            def call(self, x, mask=None):
                found.append(mask)
                return x

        x, mask = tf.ones((1, 2)), tf.constant([[True, False]])
        self.assertIsNone(symbols.get_keras_mask(x))
        symbols.set_keras_mask(x, mask)
        y = Noting()(x)
        self.assertIs(found[0], mask)
        self.assertIs(symbols.get_keras_mask(y), mask)


class VariableTest(tf.test.TestCase):
    @holds("variables.Variable.__init__", "_value")
    def test_the_value_is_seen_where_a_tensor_stands_for_it(self):
        variable = keras.Variable(1.0)
        with keras.StatelessScope([(variable, tf.constant(2.0))]):
            self.assertAllEqual(variable.value, 2.0)
            self.assertAllEqual(attributes.value_of(variable), 1.0)

    def test_a_value_is_cast_as_the_variable_would_be(self):
        found = []

        class Casting(keras.layers.Layer):
            def build(self, shape):
                self.scale = self.add_weight(shape=())

            def call(self, x):
                value = tf.constant(2.0)
                found.append(tf.cast(value, self.scale.dtype))
                return x

        Casting(dtype="mixed_float16")(tf.ones((1, 1)))
        self.assertEqual(found[0].dtype, tf.float16)
        self.assertAllEqual(found[0], 2.0)

    def test_a_value_is_made_anew_by_the_strategy_in_scope(self):
        variable = keras.Variable(1.0)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            attributes.make_value_anew(variable, lambda: tf.constant(3.0))
        self.assertIsInstance(variable.value, symbols.MirroredVariable)
        self.assertAllEqual(variable, 3.0)


if __name__ == "__main__":
    tf.test.main()
