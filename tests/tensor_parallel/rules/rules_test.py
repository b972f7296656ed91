"""What cannot be sharded is refused, by name and with what to do."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfscale

LAYERS = keras.layers
X = np.ones((4, 12), "float32")


def mlp():
    x = inputs = keras.Input((12,))
    x = LAYERS.Dense(24, name="up")(x)
    return keras.Model(inputs, LAYERS.Dense(12, name="down")(x))


def heads():
    inputs = keras.Input((5, 12))
    layer = LAYERS.MultiHeadAttention(3, 4, name="attention")
    return keras.Model(inputs, layer(inputs, inputs))


def words():
    inputs = keras.Input((5,), dtype="int32")
    return keras.Model(inputs, LAYERS.Embedding(25, 4, name="words")(inputs))


def strategy(layouts, model=2):
    return tfscale.MeshStrategy(tfscale.device_mesh(model=model), layouts)


class BadInputTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(
        (
            "heads",
            heads,
            {"attention/query/kernel": (None, "model", None)},
            "attention/query/kernel.*size 3.*model axis of 1, 3",
        ),
        (
            "vocabulary",
            words,
            {"words/embeddings": ("model", None)},
            "words/embeddings.*size 25.*model axis of 1, 5, 25",
        ),
        ("rank", mlp, {"up/kernel": ("model",)}, "one entry per dim.*up/ker"),
    )
    def test_is_refused_when_a_model_is_built(self, build, layouts, message):
        with (
            self.assertRaisesRegex(ValueError, f"(?s){message}"),
            strategy(layouts).scope(),
        ):
            build()

    @parameterized.named_parameters(
        ("no_match", {"middle/kernel": (None, "model")}, "'middle/kernel'"),
        ("a_part", {"up": (None, "model")}, "'up' .*only a part.*'up/kernel'"),
        (
            "many",
            {f"other{i}/kernel": (None, "model") for i in range(9)},
            "'other2/kernel'[^\\n]*\\n  and 6 more\\nCorrect them",
        ),
    )
    def test_a_pattern_of_nothing_is_refused_at_the_first_step(
        self, layouts, message
    ):
        with strategy(layouts).scope():
            model = mlp()
        with self.assertRaisesRegex(ValueError, f"(?s)match none.*{message}"):
            model.predict(X, verbose=0)

    def test_a_model_from_outside_of_the_scope_is_refused(self):
        model = mlp()
        mesh_strategy = strategy({"up/kernel": (None, "model")})
        with self.assertRaisesRegex(ValueError, "(?s)match none.*'up/kernel'"):
            mesh_strategy.run(model, args=(X,))


class NamedInputTest(tf.test.TestCase):
    def test_an_input_given_by_name_comes_sharded_too(self):
        # A rank's trace gave such a layer its input twice, and failed: the
        # output of the layer before was gathered for nothing.
        layouts = {
            "up/kernel": (None, "model"),
            "down/kernel": ("model", None),
        }
        with strategy(layouts).scope():
            x = inputs = keras.Input((12,))
            x = LAYERS.Dense(24, name="up")(x)
            model = keras.Model(
                inputs, LAYERS.Dense(12, name="down")(training=True, inputs=x)
            )
        lines = []
        tfscale.sharding_summary(model, print_fn=lines.append)
        self.assertIn("output sharded", lines[0])
        self.assertNotIn("Gathered", lines[0])
        weights = dict(zip(("a", "b", "c", "d"), model.get_weights()))
        expected = (X @ weights["a"] + weights["b"]) @ weights["c"]
        self.assertAllClose(model.predict(X, verbose=0), expected)


if __name__ == "__main__":
    tf.test.main()
