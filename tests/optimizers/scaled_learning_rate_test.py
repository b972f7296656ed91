"""The rate of a large batch: rules, warm-up, inner schedules."""

import keras
import tensorflow as tf
from absl.testing import parameterized

from tfscale.optimizers import ScaledLearningRate


class ScaledLearningRateTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(("linear", 1.6), ("sqrt", 0.4))
    def test_rules(self, rule, expected):
        schedule = ScaledLearningRate(0.1, 16, rule=rule)
        for step in (0, 7, 1000):
            self.assertAllClose(schedule(step), expected)

    def test_warm_up_goes_from_one_replica_to_all_in_a_straight_line(self):
        schedule = ScaledLearningRate(0.1, 8, warmup_steps=4)
        values = [schedule(step) for step in range(6)]
        self.assertAllClose(values, [0.1, 0.275, 0.45, 0.625, 0.8, 0.8])

    def test_an_inner_schedule_is_scaled_also_during_the_warm_up(self):
        inner = keras.optimizers.schedules.PiecewiseConstantDecay(
            [2], [0.1, 0.01]
        )
        schedule = ScaledLearningRate(inner, 4, warmup_steps=2)
        self.assertAllClose(
            [schedule(step) for step in (0, 1, 2, 3)], [0.1, 0.25, 0.4, 0.04]
        )

    def test_one_replica_changes_nothing(self):
        schedule = ScaledLearningRate(0.1, 1, warmup_steps=5, rule="sqrt")
        self.assertAllClose([schedule(step) for step in (0, 3, 9)], [0.1] * 3)

    def test_in_an_optimizer_that_is_saved(self):
        inner = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
        optimizer = keras.optimizers.SGD(
            ScaledLearningRate(inner, 4, warmup_steps=2)
        )
        again = keras.optimizers.deserialize(
            keras.optimizers.serialize(optimizer)
        )
        variable = keras.Variable([1.0])
        again.build([variable])
        for rate in (0.1, 0.25 * 0.5**0.1):
            self.assertAllClose(again.learning_rate, rate)
            again.apply([[0.0]], [variable])

    @parameterized.parameters(
        ({"num_replicas": 0}, "Received: num_replicas=0"),
        ({"num_replicas": 2, "warmup_steps": -1}, "warmup_steps=-1"),
        ({"num_replicas": 2, "rule": "cubic"}, "one of linear, sqrt"),
    )
    def test_what_cannot_be_is_refused(self, arguments, text):
        with self.assertRaisesRegex(ValueError, text):
            ScaledLearningRate(0.1, **arguments)


if __name__ == "__main__":
    tf.test.main()
