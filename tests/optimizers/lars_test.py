"""LARS against NumPy, on replicas, and where it is refused."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import same_numbers
from tfscale.callbacks import GradientAccumulation
from tfscale.optimizers import LARS


def reference(weights, gradients, rate, momentum, decay, trust):
    """Algorithm 1 of You et al., of a matrix."""
    velocity = np.zeros_like(weights)
    for gradient in gradients:
        norm = np.linalg.norm(weights)
        ratio = trust * norm / (np.linalg.norm(gradient) + decay * norm)
        velocity = momentum * velocity + rate * ratio * (
            gradient + decay * weights
        )
        weights = weights - velocity
    return weights


class NumbersTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(0.0, 0.01)
    def test_matrices_by_the_algorithm_and_vectors_by_momentum(self, decay):
        random = np.random.RandomState(0)
        weights = random.normal(size=(4, 3)).astype("float32")
        bias = random.normal(size=3).astype("float32")
        gradients = random.normal(size=(5, 4, 3)).astype("float32")
        variables = [keras.Variable(weights), keras.Variable(bias)]
        optimizer = LARS(0.5, 0.8, decay, trust_coefficient=0.02)
        for gradient in gradients:
            optimizer.apply([gradient, gradient[0]], variables)
        self.assertAllClose(
            variables[0],
            reference(weights, gradients, 0.5, 0.8, decay, 0.02),
            rtol=1e-5,
        )
        velocity = np.zeros(3)
        for gradient in gradients:
            velocity = 0.8 * velocity + 0.5 * gradient[0]
            bias = bias - velocity
        self.assertAllClose(variables[1], bias, rtol=1e-5)

    def test_what_is_all_zero_takes_plain_steps(self):
        zeros = keras.Variable(np.zeros((2, 2), "float32"))
        ones = keras.Variable(np.ones((2, 2), "float32"))
        optimizer = LARS(0.1, momentum=0.0)
        optimizer.apply([np.ones((2, 2)), np.zeros((2, 2))], [zeros, ones])
        self.assertAllClose(zeros, np.full((2, 2), -0.1))
        self.assertAllClose(ones, np.ones((2, 2)))

    def test_rows_of_a_lookup_are_added_up_before_norms_are_taken(self):
        results = []
        for is_dense in (True, False):
            table = keras.Variable(np.ones((3, 2), "float32"))
            gradient = tf.IndexedSlices(tf.ones((4, 2)), [1, 1, 1, 2], (3, 2))
            if is_dense:
                gradient = tf.convert_to_tensor(gradient)
            LARS(1.0).apply([gradient], [table])
            results.append(table.numpy())
        self.assertAllClose(*results, rtol=1e-6)

    def test_configuration_goes_round(self):
        optimizer = LARS(0.3, 0.7, 0.01, 0.002, global_clipnorm=1.0)
        config = keras.optimizers.serialize(optimizer)
        again = keras.optimizers.deserialize(config)
        self.assertIsInstance(again, LARS)
        self.assertEqual(again.get_config(), optimizer.get_config())
        self.assertEqual(again.get_config()["weight_decay"], 0.01)

    @parameterized.parameters(
        ({"momentum": 1.5}, "from 0 to 1. Received: momentum=1.5"),
        ({"weight_decay": -1}, "0 or above. Received: weight_decay=-1"),
        ({"trust_coefficient": 0}, "above 0. Received: trust_coefficient=0"),
    )
    def test_what_cannot_be_is_refused(self, arguments, text):
        with self.assertRaisesRegex(ValueError, text):
            LARS(**arguments)


def build():
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, "relu", name="up"),
            keras.layers.Dense(4, name="down"),
        ]
    )


def job():
    random = np.random.RandomState(0)
    return same_numbers.Job(
        build,
        {
            "x": random.normal(size=(12, 4)).astype("float32"),
            "y": random.normal(size=(12, 4)).astype("float32"),
            "batch_size": 4,
        },
        optimizer=lambda: LARS(
            1.0,
            weight_decay=0.01,
            trust_coefficient=0.1,
            global_clipnorm=0.5,
            loss_scale_factor=8.0,
        ),
    )


LAYOUTS = {
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
}


def accumulating():
    fit = dict(callbacks=[GradientAccumulation(2)])
    return dataclasses.replace(job(), fit=fit)


class MeshTest(tf.test.TestCase, parameterized.TestCase):
    # Norms of a shard, or of a replica's part, would be too small; nor are
    # those of a microbatch or a stage the norms of a step. The two that run
    # always have all of these.
    @parameterized.parameters(
        lambda: same_numbers.on_zero(
            accumulating(), data=2, model=2, layouts=LAYOUTS
        ),
        lambda: same_numbers.on_zero(job(), data=2, zero_stage=0),
        lambda: same_numbers.on_zero(job(), data=2, model=2, layouts=LAYOUTS),
        lambda: same_numbers.on_mesh(job(), 2, 2, num_ranks=2, layouts=LAYOUTS),
        lambda: same_numbers.plain(accumulating()),
        lambda: same_numbers.on_mesh(job(), num_stages=2, num_microbatches=2),
    )
    @pytest.mark.crossing(every=6)
    def test_replicas_ranks_and_parts_have_the_numbers_of_one_device(
        self, train
    ):
        expected = same_numbers.on_one_device(job())
        same_numbers.assert_same(self, expected, train())

    def test_within_loss_scaling_parts_are_refused(self):
        scaled = dataclasses.replace(
            job(),
            optimizer=lambda: keras.optimizers.LossScaleOptimizer(LARS(1.0)),
        )
        with self.assertRaisesRegex(ValueError, "LARS in a LossScaleOptimizer"):
            same_numbers.on_zero(scaled, data=2)


if __name__ == "__main__":
    tf.test.main()
