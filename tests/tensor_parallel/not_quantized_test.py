"""Layers on model ranks are not quantized, and say so."""

import warnings

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfscale

X = np.random.RandomState(0).normal(size=(8, 8)).astype("float32")


def build():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.LayerNormalization(name="norm"),
            keras.layers.Dense(8, "relu", name="up"),
            keras.layers.Dense(8, name="down"),
            keras.layers.Dense(2, name="head"),
        ]
    )


def on_ranks(make=build, **axes):
    mesh = tfscale.device_mesh(**axes, model=2)
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*norm/gamma"] = ("model",)
    layout_map[".*up/kernel"] = (None, "model")
    layout_map[".*down/kernel"] = ("model", None)
    with tfscale.MeshStrategy(mesh, layout_map).scope():
        return make()


class NotQuantizedTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("int8", {}), ("int4", {}), ("int8", dict(type_check=False))
    )
    def test_a_layer_on_ranks_is_refused_by_name(self, mode, options):
        # It stayed float: Keras asks for the class, and warned that a Dense
        # cannot be quantized.
        model = on_ranks()
        expected = model.predict(X, verbose=0)
        with self.assertRaisesRegex(
            ValueError,
            f"model ranks cannot be quantized.*mode='{mode}', for '.*/up' "
            "of type Dense.*plain model",
        ):
            model.quantize(mode, filters="up|down|head", **options)
        self.assertAllClose(model.predict(X, verbose=0), expected)

    def test_other_layers_are_quantized_and_warned_of_as_in_keras(self):
        model = on_ranks()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.quantize("int8", filters="^(norm|head)$")
        self.assertIn(
            "Layer LayerNormalization does not have a `quantize`",
            "\n".join(str(warning.message) for warning in caught),
        )
        self.assertEqual(model.get_layer("head").quantization_mode, "int8")
        self.assertIsNone(model.get_layer("up").quantization_mode)

    def test_trained_weights_are_quantized_in_a_plain_model(self):
        # What the error says to do.
        sharded, plain, expected = on_ranks(), build(), build()
        plain.set_weights(sharded.get_weights())
        for model in plain, expected:
            model.quantize("int8", filters="up|down|head")
        self.assertAllEqual(
            plain.predict(X, verbose=0), expected.predict(X, verbose=0)
        )


if __name__ == "__main__":
    tf.test.main()
