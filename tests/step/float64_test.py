"""Models in float64 have the numbers of one device to float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(16, 6), RANDOM.randint(0, 3, 16)
WEIGHTS = RANDOM.rand(16)


def train(reduction, strategy=None, num_microbatches=None, callbacks=()):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = inner = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, "tanh", kernel_regularizer="l2"),
                keras.layers.Dense(3),
            ]
        )
        if num_microbatches:
            model = tfscale.PipelineModel(inner, num_microbatches)
        model.compile(
            keras.optimizers.SGD(0.1),
            keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction=reduction
            ),
            run_eagerly=not strategy and not callbacks,
        )
    # Replicas and microbatches of different sizes.
    model.fit(
        X,
        Y,
        batch_size=5,
        sample_weight=WEIGHTS,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return [np.array(variable) for variable in inner.variables]


def sharded(strategy=None, layouts=None):
    """Weights and slots after steps that clip and average."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with (strategy or tf.distribute.get_strategy()).scope():
        inputs = keras.Input((6,))
        x = keras.layers.Dense(8, name="up")(inputs)
        x = keras.layers.LayerNormalization(name="norm")(x)
        model = keras.Model(inputs, keras.layers.Dense(4, name="down")(x))
        optimizer = keras.optimizers.Adam(
            0.01, global_clipnorm=0.1, use_ema=True, ema_momentum=0.7
        )
        model.compile(optimizer, "mse", run_eagerly=strategy is None)
    model.fit(X, X[:, :4], batch_size=8, shuffle=False, verbose=0)
    return [np.array(v) for v in [*model.variables, *optimizer.variables]]


class Float64Test(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        before = keras.config.floatx(), keras.config.dtype_policy()
        self.addCleanup(keras.config.set_dtype_policy, before[1])
        self.addCleanup(keras.config.set_floatx, before[0])
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")

    @parameterized.parameters("mean_with_sample_weight", "sum_over_batch_size")
    @pytest.mark.crossing(every=2)
    def test_parts_of_a_batch_lose_no_digits(self, reduction):
        expected = train(reduction)
        self.assertEqual({v.dtype for v in expected}, {np.dtype("float64")})
        found = {
            "pipeline": train(
                reduction,
                tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2)),
                num_microbatches=3,
            ),
            "replicas": train(
                reduction, tfscale.MeshStrategy(tfscale.device_mesh(data=3))
            ),
            "accumulation": train(
                reduction,
                callbacks=[tfscale.callbacks.GradientAccumulation(3)],
            ),
        }
        for name, values in found.items():
            for one, other in zip(expected, values, strict=True):
                np.testing.assert_allclose(
                    other, one, rtol=0, atol=1e-14, err_msg=name
                )

    @parameterized.parameters(dict(data=2), dict(model=2))
    @pytest.mark.crossing(every=2)
    def test_shards_lose_no_digits(self, **axes):
        # Norms, averages and LayerNormalization were computed in float32.
        mesh = tfscale.device_mesh(**axes)
        layout_map = keras.distribution.LayoutMap(mesh)
        if "model" in axes:
            layout_map["up/kernel"] = (None, "model")
            layout_map["up/bias|norm/(gamma|beta)"] = ("model",)
            layout_map["down/kernel"] = ("model", None)
        strategy = tfscale.MeshStrategy(
            mesh, layout_map, zero_stage=int("data" in axes)
        )
        for one, other in zip(sharded(), sharded(strategy), strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-13)
