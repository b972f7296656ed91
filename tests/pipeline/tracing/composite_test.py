"""Layers made of layers are cut where they are too large, if they can be."""

import itertools

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfscale.pipeline.planning.named_schedules import one_f_one_b
from tfscale.pipeline.stages.plan import make_plan

LAYERS = keras.layers
OPS = keras.ops


class Tower(LAYERS.Layer):
    """Four layers and a residual; subclasses do more than call them."""

    def __init__(self, **kwargs):
        super().__init__(name="tower", **kwargs)
        self.inner = [LAYERS.Dense(32, name=f"inner_{i}") for i in range(4)]
        self.dropout = LAYERS.Dropout(0.5, seed=1, name="dropout")

    def build(self, shape):
        for layer in self.inner:
            layer.build(shape)

    def call(self, x):
        y = x
        for layer in self.inner:
            y = self.dropout(layer(y))
        return OPS.gelu(x + y)


class UsesAVariable(Tower):
    def build(self, shape):
        super().build(shape)
        self.scale = self.add_weight(shape=shape[-1:])

    def call(self, x):
        return super().call(x) * self.scale


class ReadsAnInnerVariable(Tower):
    def call(self, x):
        return super().call(x) + OPS.sum(self.inner[0].kernel)


class HasOneItDoesNotUse(Tower):
    def build(self, shape):
        super().build(shape)
        self.unused = self.add_weight(shape=(2,))


class Draws(Tower):
    def call(self, x):
        return super().call(x) + keras.random.normal((32,))


class AddsALoss(Tower):
    def call(self, x):
        self.add_loss(OPS.mean(x))
        return super().call(x)


class IsAnotherInTraining(Tower):
    def call(self, x, training=False):
        return super().call(x) * (2.0 if training else 3.0)


class FixesTraining(Tower):
    def call(self, x):
        return self.dropout(super().call(x), training=False)


class HasAConstant(Tower):
    def call(self, x):
        return super().call(x) + np.ones((32,), "float32")


class UsesTensorFlow(Tower):
    def call(self, x):
        return tf.tanh(super().call(x))


class TakesAMask(Tower):
    def call(self, x, mask=None):
        return super().call(x)


def _model(tower, *before):
    x = inputs = keras.Input((32,))
    for layer in (*before, LAYERS.Dense(32, name="first"), tower):
        x = layer(x)
    return keras.Model(inputs, LAYERS.Dense(32, name="last")(x))


def _names(model, balance="flops", num_stages=2):
    plan = make_plan(model, one_f_one_b(num_stages, 2), balance)
    return [[call.name for call in stage.calls] for stage in plan.stages]


class CompositeTest(tf.test.TestCase, parameterized.TestCase):
    def test_a_cut_goes_through_a_layer_that_is_too_large(self):
        # The encoder of a ViT has 9/10 of its work: two devices were as fast
        # as one.
        first, second = _names(_model(Tower()))
        self.assertEqual(first[:2], ["first", "inner_0"])
        self.assertIn("inner_3", second)
        self.assertEqual(second[-1], "last")

    @parameterized.parameters(
        UsesAVariable,
        ReadsAnInnerVariable,
        HasOneItDoesNotUse,
        Draws,
        AddsALoss,
        IsAnotherInTraining,
        FixesTraining,
        HasAConstant,
        UsesTensorFlow,
        TakesAMask,
    )
    def test_one_that_does_more_than_call_layers_stays_whole(self, tower):
        names = itertools.chain(*_names(_model(tower())))
        self.assertEqual(list(names), ["first", "tower", "last"])

    def test_one_of_a_masked_tensor_stays_whole(self):
        tower = Tower()
        tower.supports_masking = True
        names = _names(_model(tower, LAYERS.Masking()))
        self.assertIn("tower", itertools.chain(*names))

    def test_one_that_a_stage_can_take_stays_whole(self):
        tower = Tower()
        tower.inner[2:] = []
        model = _model(tower, *(LAYERS.Dense(32) for _ in range(3)))
        self.assertIn("tower", itertools.chain(*_names(model)))

    def test_one_stage_needs_no_cut(self):
        self.assertEqual(
            _names(_model(Tower()), num_stages=1), [["first", "tower", "last"]]
        )

    def test_named_cuts_are_of_the_model_as_it_is(self):
        self.assertEqual(
            _names(_model(Tower()), ["last"]), [["first", "tower"], ["last"]]
        )


if __name__ == "__main__":
    tf.test.main()
