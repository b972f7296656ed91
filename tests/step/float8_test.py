"""Float8 on parts of a batch: largest values are those of all parts.

Keras overwrites scales and histories with what it calls their gradients. They
were summed over replicas and microbatches: a history grew at each step, and
training ended in NaN.
"""

import contextlib
import functools

import keras
import numpy as np
import pytest
from absl.testing import parameterized

import tfscale
from tests import same_numbers

RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(38, 64)).astype("float32")
Y = RANDOM.normal(size=(38, 64)).astype("float32")


def train(strategy=None, num_microbatches=None, wrap=False, **options):
    """Trains five steps, the last of 6 rows; returns all variables."""
    same_numbers.reset()
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, "relu", name="a"),
                keras.layers.EinsumDense("bi,ij->bj", 64, name="b"),
            ]
        )
        for layer in model.layers:
            layer.quantize("float8")
        trained = model
        if wrap:
            trained = tfscale.PipelineModel(model, num_microbatches)
        trained.compile(keras.optimizers.SGD(0.01, **options), "mse")
    callbacks = []
    if num_microbatches and not wrap:
        accumulation = tfscale.callbacks.GradientAccumulation
        callbacks.append(accumulation(num_microbatches))
    trained.fit(
        X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks
    )
    return {v.path.partition("/")[2]: v.numpy() for v in model.variables}


MESHES = {
    "data": (dict(data=2), {}, {}),
    "more_data": (dict(data=3), {}, {}),
    "zero_1": (dict(data=2), dict(zero_stage=1), {}),
    "zero_2_accumulated": (
        dict(data=2),
        dict(zero_stage=2),
        dict(num_microbatches=3),
    ),
    "zero_3": (dict(data=2), dict(zero_stage=3), {}),
    "accumulated": ({}, {}, dict(num_microbatches=4)),
    "pipeline": (dict(pipeline=2), {}, dict(num_microbatches=3, wrap=True)),
    "data_and_pipeline": (
        dict(data=2, pipeline=2),
        {},
        dict(num_microbatches=2, wrap=True),
    ),
}


one_device = functools.cache(train)


class Float8Test(parameterized.TestCase):
    @parameterized.named_parameters((name, name) for name in MESHES)
    @pytest.mark.crossing(every=8)
    def test_scales_and_weights_are_those_of_one_device(self, name):
        axes, options, how = MESHES[name]
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(**axes), **options)
        expected, found = one_device(), train(strategy, **how)
        self.assertEqual(expected.keys(), found.keys())
        for path, value in expected.items():
            # A value between two of float8 may be rounded to either.
            is_scale = "amax" in path or "scale" in path
            with self.subTest(path):
                np.testing.assert_allclose(
                    found[path],
                    value,
                    rtol=0,
                    atol=np.abs(value).max() * (1e-2 if not is_scale else 2e-2),
                )

    @pytest.mark.crossing
    def test_a_clipped_norm_has_no_part_of_them(self):
        strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(data=2), zero_stage=1
        )
        expected = train(global_clipnorm=0.01)
        found = train(strategy, global_clipnorm=0.01)
        for path, value in expected.items():
            if "kernel" in path:
                atol = 1e-3 * np.abs(value).max()
                np.testing.assert_allclose(found[path], value, 0, atol)
