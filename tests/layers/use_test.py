"""How layers that divide their own variables are used, and misused."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tfscale import layers

TOKENS = np.arange(12).reshape(2, 6) % 5


def strategy(num_ranks=2):
    return tfscale.MeshStrategy(tfscale.device_mesh(model=num_ranks))


def small_model():
    """One layer of each kind."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.VocabParallelEmbedding(8, 4, tie_weights=False, name="t")(inputs)
    x = layers.ParallelMultiHeadAttention(2, 3, use_gate=True, name="a")(x, x)
    x = layers.ColumnParallelDense(6, "relu", name="up")(x)
    x = layers.RowParallelDense(4, name="down")(x)
    x = layers.ColumnParallelDense(2, gather_output=True, name="out")(x)
    return keras.Model(
        inputs,
        layers.RowParallelDense(2, input_is_parallel=False, name="in")(x),
    )


class PlainTest(tf.test.TestCase):
    def test_with_no_strategy_they_are_the_layers_of_keras(self):
        x = np.random.RandomState(0).randn(2, 5, 4).astype("float32")
        for layer, plain, inputs in [
            (
                layers.ColumnParallelDense(6, "relu"),
                keras.layers.Dense(6, "relu"),
                (x,),
            ),
            (layers.RowParallelDense(3), keras.layers.Dense(3), (x,)),
            (
                layers.VocabParallelEmbedding(8, 3),
                keras.layers.Embedding(8, 3),
                (TOKENS,),
            ),
            (
                layers.ParallelMultiHeadAttention(2, 3),
                keras.layers.MultiHeadAttention(2, 3),
                (x, x),
            ),
        ]:
            layer(*inputs)
            plain(*inputs)
            plain.set_weights(layer.get_weights())
            self.assertAllEqual(layer(*inputs), plain(*inputs))

    def test_their_configuration_makes_them_anew(self):
        model = small_model()
        clone = keras.Model.from_config(model.get_config())
        clone.set_weights(model.get_weights())
        self.assertAllEqual(model(TOKENS), clone(TOKENS))
        configs = {layer.name: layer.get_config() for layer in clone.layers}
        self.assertFalse(configs["up"]["gather_output"])
        self.assertTrue(configs["out"]["gather_output"])
        self.assertTrue(configs["down"]["input_is_parallel"])
        self.assertFalse(configs["in"]["input_is_parallel"])
        self.assertFalse(configs["t"]["tie_weights"])

    def test_a_model_saved_on_ranks_is_loaded_anywhere(self):
        with strategy().scope():
            model = small_model()
            expected = model.predict(TOKENS, verbose=0)
        path = self.create_tempdir().create_file("model.keras").full_path
        model.save(path)
        plain = keras.saving.load_model(path)
        self.assertIsInstance(plain.get_layer("up"), layers.ColumnParallelDense)
        for saved, loaded in zip(model.get_weights(), plain.get_weights()):
            self.assertAllEqual(saved, loaded)
        self.assertAllClose(
            plain.predict(TOKENS, verbose=0), expected, rtol=1e-5
        )
        mesh = tfscale.device_mesh(data=2, model=2)
        with tfscale.MeshStrategy(mesh).scope():
            loaded = keras.saving.load_model(path)
            found = loaded.predict(TOKENS, verbose=0)
        self.assertAllClose(found, expected, rtol=1e-5)


class RanksTest(tf.test.TestCase, parameterized.TestCase):
    def test_scores_of_all_heads_are_returned(self):
        x = np.random.RandomState(0).randn(4, 5, 6).astype("float32")

        def build():
            keras.utils.set_random_seed(0)
            inputs = keras.Input((5, 6))
            return keras.Model(
                inputs,
                layers.ParallelMultiHeadAttention(4, 3)(
                    inputs, inputs, return_attention_scores=True
                ),
            )

        expected = build().predict(x, verbose=0)
        with strategy(4).scope():
            found = build().predict(x, verbose=0)
        self.assertEqual(found[1].shape, (4, 4, 5, 5))
        for a, b in zip(expected, found):
            self.assertAllClose(a, b, rtol=1e-5)

    def test_a_subclassed_model_that_fit_builds_is_sharded(self):
        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.up = layers.ColumnParallelDense(6)
                self.down = layers.RowParallelDense(2)

            def call(self, x):
                return self.down(self.up(x))

        with strategy().scope():
            model = Model()
            model.compile("sgd", "mse")
            model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
        for variable in (model.up.kernel, model.up.bias, model.down.kernel):
            first, _ = variable.value.values
            self.assertEqual(
                first.shape.num_elements() * 2, np.size(variable.numpy())
            )

    def test_a_layer_works_in_a_loop_of_the_user(self):
        ranks = strategy()
        with ranks.scope():
            up = layers.ColumnParallelDense(6)
            up.build((None, 3))

        @tf.function
        def run(x):
            return ranks.run(up, (x,))

        # What the first rank returns: its half.
        self.assertAllClose(
            run(tf.ones((4, 3))),
            np.ones((4, 3)) @ np.array(up.kernel)[:, :3],
            rtol=1e-5,
        )


class ErrorsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (
            lambda: layers.ColumnParallelDense(7, name="up").build((None, 4)),
            r"'up/kernel' of shape \(4, 7\) .* dim 1 has size 7, .* size 2\. "
            r"Use a model axis of 1, 7, or a dim of 8",
        ),
        (
            lambda: layers.RowParallelDense(4, name="down").build((None, 3)),
            r"'down/kernel' of shape \(3, 4\) .* dim 0 has size 3.* 1, 3,.* 4",
        ),
        (
            lambda: layers.VocabParallelEmbedding(5, 4, name="t").build(),
            r"'t/embeddings' of shape \(5, 4\) .* dim 0 has size 5, .* of 6",
        ),
        (
            lambda: layers.ParallelMultiHeadAttention(1, 4, name="a").build(
                (None, 5, 4), (None, 5, 4)
            ),
            r"'a/query/kernel' of shape \(4, 1, 4\) .* dim 1 has size 1.* of 2",
        ),
    )
    def test_sizes_that_the_axis_does_not_divide(self, make, message):
        with strategy().scope(), self.assertRaisesRegex(ValueError, message):
            make()

    @parameterized.parameters(
        ("softmax", None, "must be elementwise.*'softmax'.*gather_output=True"),
        (None, "l2", "regularizer needs the whole.*gather_output=True"),
    )
    def test_what_needs_the_whole_output(self, activation, penalty, message):
        with self.assertRaisesRegex(ValueError, message):
            layers.ColumnParallelDense(
                4, activation, activity_regularizer=penalty
            )
        layers.ColumnParallelDense(
            4, activation, activity_regularizer=penalty, gather_output=True
        )

    def test_a_divided_output_that_is_used_whole(self):
        with strategy().scope():
            up = layers.ColumnParallelDense(4, name="up")
            model = keras.Sequential([keras.Input((3,)), up])
            model.add(keras.layers.Softmax())
            with self.assertRaisesRegex(
                ValueError, "'up' with gather_output=False, but Softmax"
            ):
                model.predict(np.ones((4, 3)), verbose=0)

    def test_a_divided_output_that_leaves_the_model(self):
        with strategy().scope():
            up = layers.ColumnParallelDense(4, name="up")
            model = keras.Sequential([keras.Input((3,)), up])
            with self.assertRaisesRegex(ValueError, "leaves the model"):
                model.predict(np.ones((4, 3)), verbose=0)

    def test_an_input_that_is_whole(self):
        with strategy().scope():
            down = layers.RowParallelDense(4, name="down")
            model = keras.Sequential([keras.Input((6,)), down])
            with self.assertRaisesRegex(
                ValueError, "shard of 6 entries.*6.*'down', which is whole"
            ):
                model.predict(np.ones((4, 6)), verbose=0)

    def test_a_layout_map_that_says_otherwise(self):
        mesh = tfscale.device_mesh(model=2)
        layout_map = keras.distribution.LayoutMap(mesh)
        layout_map["up/kernel"] = ("model", None)
        with (
            tfscale.MeshStrategy(mesh, layout_map).scope(),
            self.assertRaisesRegex(ValueError, "'up/kernel'.*along dim 1"),
        ):
            layers.ColumnParallelDense(4, name="up").build((None, 4))

    def test_a_mesh_over_which_nothing_is_sharded(self):
        with strategy().scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            with self.assertRaisesRegex(
                ValueError, "axis of size 2, layout_map=None"
            ):
                model.predict(np.ones((4, 3)), verbose=0)


if __name__ == "__main__":
    tf.test.main()
