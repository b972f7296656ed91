"""`keras.callbacks.SwapEMAWeights` where slots are in parts.

It swaps weights, which all replicas have, with their averages, of which each
has a part: for every evaluation, or between epochs.
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
from tests.variables import zero_test


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
    def check(
        self,
        data,
        pipeline=None,
        model=1,
        zero_stage=1,
        by_epoch=True,
        **kwargs,
    ):
        actual = same_numbers.on_zero(
            job(by_epoch, **kwargs),
            data,
            pipeline,
            model,
            optimizer_test.LAYOUTS if model > 1 else None,
            zero_stage,
        )
        expected = same_numbers.on_one_device(job(by_epoch, **kwargs))
        same_numbers.assert_same(self, expected, actual)
        if zero_stage:
            zero_test.check_parts(self, actual, data, model)
        for variable in actual.model.trainable_variables:
            if variable.value.sharding.model_dim is None:
                first, *others = variable.value.values
                for other in others:
                    np.testing.assert_array_equal(first, other)

    @parameterized.parameters((2, None, 1), (4, None, 1), (2, None, 2))
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
    def test_of_variables_of_which_some_are_whole(self):
        self.check(2, build=zero_test.odd)

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

    @pytest.mark.crossing
    def test_of_model_ranks_without_zero(self):
        self.check(1, None, 2, zero_stage=0)


class UpdateTest(tf.test.TestCase):
    def test_of_a_weight_by_its_slot_and_back_is_of_parts(self):
        strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(data=2), zero_stage=1
        )
        with strategy.scope():
            model = optimizer_test.mlp()
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            optimizer.build(model.trainable_variables)
        weight, slot = model.trainable_variables[0], optimizer.momentums[0]
        value = np.arange(12 * 24, dtype="float32").reshape(12, 24)
        weight.assign(value)
        update = strategy.extended.update
        update(slot.value, lambda a, b: a.assign(b), args=(weight.value,))
        np.testing.assert_array_equal(np.array(slot), value)
        self.assertEqual(
            [c.shape for c in slot.value.values], [(6, 24), (6, 24)]
        )
        update(weight.value, lambda a, b: a.assign_add(b), args=(slot.value,))
        for component in weight.value.values:
            np.testing.assert_array_equal(component, 2 * value)


if __name__ == "__main__":
    tf.test.main()
