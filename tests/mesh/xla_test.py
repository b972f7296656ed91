"""What XLA cannot compile is refused before anything runs."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests.tensor_parallel import optimizer_test

X = optimizer_test.DATA["x"]


def strategy_for(**sizes):
    mesh = tfscale.device_mesh(**sizes)
    layout_map = keras.distribution.LayoutMap(mesh)
    if sizes.get("model", 1) > 1:
        for pattern, layout in optimizer_test.LAYOUTS.items():
            layout_map[pattern] = layout
    return tfscale.MeshStrategy(mesh, layout_map)


class CompiledStepTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(dict(data=2), dict(model=2))
    def test_over_several_devices_is_refused(self, **sizes):
        with strategy_for(**sizes).scope():
            model = optimizer_test.mlp()
            model.compile("sgd", "mse", jit_compile=True)
        before = model.get_weights()
        with self.assertRaisesRegex(
            ValueError,
            "for one device. Received: .* mesh of 2 devices.*jit_compile=True. "
            "Pass jit_compile=False",
        ):
            model.fit(X, X, batch_size=16, verbose=0)
        for value, found in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(found, value)

    def test_by_hand_is_refused(self):
        strategy = strategy_for(data=2)
        with self.assertRaisesRegex(ValueError, "XLA compiles a function for"):
            tf.function(
                lambda: strategy.run(tf.zeros, ((),)), jit_compile=True
            )()

    def test_a_function_of_model_ranks_is_refused(self):
        strategy = strategy_for(model=2)
        with strategy.scope():
            optimizer_test.mlp()
        compiled = tf.function(lambda: tf.zeros(()), jit_compile=True)
        with self.assertRaisesRegex(ValueError, "XLA compiles a function for"):
            strategy.run(compiled)

    def test_on_one_device_has_the_numbers_of_keras(self):
        losses = []
        for strategy in (tf.distribute.get_strategy(), strategy_for(data=1)):
            keras.utils.set_random_seed(1)
            with strategy.scope():
                model = optimizer_test.mlp()
                model.compile("sgd", "mse", jit_compile=True)
            history = model.fit(X, X, shuffle=False, verbose=0)
            losses.append(history.history["loss"])
        self.assertAllClose(*losses)


class CompiledStagesTest(tf.test.TestCase):
    def test_of_model_ranks_are_refused(self):
        with strategy_for(pipeline=2, model=2).scope():
            model = tfscale.PipelineModel(optimizer_test.mlp(), 2)
            with self.assertRaisesRegex(
                ValueError,
                "model ranks.* Received: jit_compile=True .* model=2. Leave",
            ):
                model.compile("sgd", "mse", jit_compile=True)


if __name__ == "__main__":
    tf.test.main()
