"""What the optimizers of a mesh rely on in those of Keras."""

import keras
import tensorflow as tf

from tests._internals.contracts import holds
from tests._internals.contracts import recording
from tfscale._internals import attributes
from tfscale._internals import instances

# What an `apply` goes through, in this order.
STEPS = (
    "_backend_apply_gradients",
    "_clip_gradients",
    "_apply_weight_decay",
    "_backend_update_step",
    "_update_model_variables_moving_average",
    "_overwrite_model_variables_with_average_value",
)


class OptimizerContractsTest(tf.test.TestCase):
    @holds("BaseOptimizer", *STEPS[:2], STEPS[4])
    @holds("TFOptimizer", STEPS[2], STEPS[3], STEPS[5])
    def test_apply_goes_through_its_steps_in_order(self):
        for kind in (keras.optimizers.SGD, keras.optimizers.Adam):
            calls = []
            optimizer = recording(kind, STEPS, calls)(
                0.1,
                clipnorm=1.0,
                weight_decay=0.1,
                use_ema=True,
                ema_overwrite_frequency=1,
            )
            variable = keras.Variable([3.0, 4.0])
            optimizer.apply([tf.constant([30.0, 40.0])], [variable])
            self.assertEqual(calls, list(STEPS))

    @holds("BaseOptimizer", "_clip_gradients")
    def test_gradients_are_clipped_nowhere_else(self):
        class NotClipping(keras.optimizers.SGD):
            def _clip_gradients(self, grads):
                return grads

        for argument in ("clipnorm", "global_clipnorm", "clipvalue"):
            variable = keras.Variable([0.0])
            optimizer = NotClipping(1.0, **{argument: 0.5})
            optimizer.apply([tf.constant([8.0])], [variable])
            self.assertAllEqual(variable, [-8.0])

    @holds("TFOptimizer", "_apply_weight_decay", "_backend_update_step")
    def test_variables_are_updated_in_the_two_that_run_on_shards(self):
        class NotUpdating(keras.optimizers.SGD):
            def _apply_weight_decay(self, variables):
                pass

            def _backend_update_step(self, *args):
                pass

        variable = keras.Variable([1.0])
        optimizer = NotUpdating(1.0, weight_decay=0.1)
        optimizer.apply([tf.constant([8.0])], [variable])
        self.assertAllEqual(variable, [1.0])

    @holds("BaseOptimizer.__init__", "_trainable_variables")
    @holds("BaseOptimizer.build", "_model_variables_moving_average")
    def test_averages_stand_in_the_order_of_the_variables(self):
        variables = [keras.Variable([1.0]), keras.Variable([2.0, 3.0])]
        optimizer = keras.optimizers.SGD(1.0, use_ema=True)
        optimizer.build(variables)
        self.assertEqual(optimizer._trainable_variables, variables)
        averages = optimizer._model_variables_moving_average
        self.assertEqual(
            [a.shape for a in averages], [v.shape for v in variables]
        )

    @holds("BaseOptimizer.__init__", "_iterations")
    def test_updates_are_counted_and_rates_found_by_one_attribute(self):
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
            [5], [1.0, 100.0]
        )
        other = keras.Variable(7, dtype="int32")
        variable = keras.Variable([0.0])
        optimizer = keras.optimizers.SGD(schedule)
        optimizer.build([variable])
        found = instances.view(optimizer, **attributes.with_iterations(other))
        found.apply([tf.constant([1.0])], [variable])
        self.assertAllEqual(variable, [-100.0])
        self.assertEqual(int(found.iterations), 8)
        self.assertEqual(int(optimizer.iterations), 0)

    @holds("BaseOptimizer", "_get_variable_index")
    def test_a_variable_has_the_index_of_its_slot(self):
        variables = [keras.Variable([1.0]), keras.Variable([2.0, 3.0])]
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(variables)
        for index, variable in enumerate(variables):
            for known in (variable, variable.value):
                self.assertEqual(optimizer._get_variable_index(known), index)

    @holds("TFOptimizer._var_key", "_distributed_container")
    def test_a_part_is_known_as_its_variable(self):
        variable = keras.Variable([1.0])
        optimizer = keras.optimizers.SGD(1.0, momentum=0.9)
        optimizer.build([variable])

        class Part:
            def _distributed_container(self):
                return variable.value

        self.assertEqual(
            optimizer._var_key(Part()), optimizer._var_key(variable)
        )

    def test_a_scaling_optimizer_clips_in_the_one_inside_and_asks_itself(self):
        calls = []
        inner = recording(keras.optimizers.SGD, STEPS, calls)(1.0)
        optimizer = recording(
            keras.optimizers.LossScaleOptimizer, ("check_finite",), calls
        )(inner, initial_scale=2.0)
        variable = keras.Variable([0.0])
        strategy = tf.distribute.get_strategy()
        strategy.run(optimizer.apply, args=([tf.constant([8.0])], [variable]))
        self.assertEqual(calls, ["check_finite", *STEPS[:4]])
        self.assertAllEqual(variable, [-4.0])


if __name__ == "__main__":
    tf.test.main()
