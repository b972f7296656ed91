"""`keras.callbacks.SwapEMAWeights`, which swaps weights with their averages.

For every evaluation, or between epochs, where both are divided alike.
"""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.tensor_parallel import optimizer_test
from tests.variables import fully_sharded_test


def sgd():
    return keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.7)


def scaled():
    return optimizer_test.scaled(sgd())


def job(by_epoch, build=optimizer_test.mlp, make_optimizer=sgd):
    """Made anew for each side: the callback has a state."""
    data = optimizer_test.DATA
    return dataclasses.replace(
        optimizer_test.job(make_optimizer, build),
        fit=dict(
            epochs=2,
            validation_data=(data["x"][:16], data["y"][:16]),
            callbacks=[keras.callbacks.SwapEMAWeights(by_epoch)],
        ),
    )


class SwapEMAWeightsTest(tf.test.TestCase, parameterized.TestCase):
    def check(self, data, pipeline=None, model=1, by_epoch=True, **kwargs):
        actual = same_numbers.on_zero(
            job(by_epoch, **kwargs),
            data,
            pipeline,
            model,
            optimizer_test.LAYOUTS if model > 1 else None,
            0,
        )
        expected = same_numbers.on_one_device(job(by_epoch, **kwargs))
        same_numbers.assert_same(self, expected, actual)
        for variable in actual.model.trainable_variables:
            if variable.value.sharding.model_dim is None:
                first, *others = variable.value.values
                for other in others:
                    np.testing.assert_array_equal(first, other)

    @parameterized.parameters((2, None, 1), (1, None, 2), (2, None, 2))
    @pytest.mark.crossing(every=3)
    def test_has_the_numbers_of_one_device(self, *sizes):
        self.check(*sizes)

    @pytest.mark.crossing
    def test_for_evaluations_only(self):
        self.check(2, by_epoch=False)

    @pytest.mark.crossing
    def test_of_pipelines(self):
        self.check(2, 2, 1)

    @pytest.mark.crossing
    def test_under_loss_scaling(self):
        self.check(2, make_optimizer=scaled)

    @parameterized.parameters(False, True)
    @pytest.mark.crossing(every=2)
    def test_of_weights_that_replicas_divide(self, by_epoch):
        with fully_sharded_test.small_weights_divided():
            actual = same_numbers.on_zero(job(by_epoch), 2, zero_stage=3)
        self.assertNotEmpty(fully_sharded_test.divided(actual.model))
        expected = same_numbers.on_one_device(job(by_epoch))
        same_numbers.assert_same(self, expected, actual)


class RefusedTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(zero_stage=[1, 2], method=["fit", "evaluate"])
    def test_averages_that_are_divided_and_weights_that_are_not(
        self, zero_stage, method
    ):
        strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(data=2), zero_stage=zero_stage
        )
        with strategy.scope():
            model = optimizer_test.mlp()
            model.compile(sgd(), "mse")
            model.optimizer.build(model.trainable_variables)
        before = [np.array(weight) for weight in model.weights]
        data = optimizer_test.DATA
        with self.assertRaisesRegex(ValueError, f"zero_stage={zero_stage}"):
            getattr(model, method)(
                data["x"],
                data["y"],
                callbacks=[keras.callbacks.SwapEMAWeights()],
                verbose=0,
            )
        for weight, value in zip(model.weights, before, strict=True):
            np.testing.assert_array_equal(np.array(weight), value)


if __name__ == "__main__":
    tf.test.main()
