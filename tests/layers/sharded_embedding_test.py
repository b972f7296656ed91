"""In one part or in several it is Keras' own embedding."""

import os

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers

_TOKENS = np.array([[5, 0, 5], [6, 5, 1], [2, 2, 2], [0, 4, 3]])


def plain():
    return keras.layers.Embedding(7, 3, mask_zero=True, name="table")


def sharded(num_shards):
    return tfscale.layers.ShardedEmbedding(
        7, 3, mask_zero=True, num_shards=num_shards, name="table"
    )


def model_of(layer):
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            layer,
            keras.layers.GlobalAveragePooling1D(),
        ]
    )


def trained(make):
    same_numbers.reset()
    model = model_of(make())
    optimizer = keras.optimizers.Adam(0.1, global_clipnorm=0.1)
    optimizer = same_numbers.with_dense_gradients(optimizer)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse", run_eagerly=True)
    model.fit(_TOKENS, np.ones((4, 3)), epochs=3, batch_size=2, verbose=0)
    return model


class ShardedEmbeddingTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(1, 3)
    def test_it_trains_as_that_of_keras(self, num_shards):
        expected = trained(plain)
        model = trained(lambda: sharded(num_shards))
        self.assertAllClose(
            model.layers[0].embeddings, expected.layers[0].embeddings, 1e-6
        )
        self.assertAllClose(
            model.predict(_TOKENS, verbose=0),
            expected.predict(_TOKENS, verbose=0),
            1e-6,
        )

    def test_initial_values_are_those_of_keras(self):
        tables = []
        for make in (plain, lambda: sharded(3)):
            same_numbers.reset()
            layer = make()
            layer.build()
            tables.append(keras.ops.convert_to_numpy(layer.embeddings))
        np.testing.assert_array_equal(*tables)

    def test_only_rows_that_occur_are_read_and_each_once(self):
        layer = sharded(2)
        layer.build()

        @tf.function
        def step(tokens):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(tokens) ** 2)
            return tape.gradient(loss, [v.value for v in layer.shards])

        gradients = step(tf.constant([5, 1, 5, 3, 5]))
        self.assertEqual([len(g.indices) for g in gradients], [0, 3])
        graph = step.get_concrete_function(tf.constant([1])).graph
        readers = [
            op.type
            for op in graph.get_operations()
            if any(i.dtype == tf.resource for i in op.inputs)
        ]
        self.assertEqual(set(readers), {"ResourceGather"})

    def test_weights_load_with_other_numbers_of_shards(self):
        path = os.path.join(self.create_tempdir(), "model.weights.h5")
        table = np.arange(21.0).reshape(7, 3)
        source = model_of(sharded(3))
        for number, shard in enumerate(source.layers[0].shards):
            shard.assign(table[number::3])
        source.save_weights(path)
        for make in (lambda: sharded(2), lambda: sharded(1)):
            model = model_of(make())
            model.load_weights(path)
            self.assertAllEqual(model.layers[0].embeddings, table)
        store = {}
        source.layers[0].save_own_variables(store)
        embedding = plain()
        embedding.build()
        embedding.load_own_variables(store)
        self.assertAllEqual(embedding.embeddings, table)
        wrong = model_of(tfscale.layers.ShardedEmbedding(8, 3, name="table"))
        with self.assertRaisesRegex(ValueError, r"\(7, 3\) for 'table' of"):
            wrong.load_weights(path)

    def test_a_compiled_model_loads_with_its_slots(self):
        model = trained(lambda: sharded(2))
        path = os.path.join(self.create_tempdir(), "model.keras")
        model.save(path)
        loaded = keras.saving.load_model(path)
        for a, b in zip(
            model.optimizer.variables, loaded.optimizer.variables, strict=True
        ):
            self.assertAllEqual(a, b)
        self.assertAllEqual(
            model.layers[0].embeddings, loaded.layers[0].embeddings
        )

    def test_the_mask_and_the_dtype_are_those_of_keras(self):
        keras.config.set_dtype_policy("mixed_bfloat16")
        layers = plain(), sharded(2)
        found = [layer(_TOKENS) for layer in layers]
        self.assertEqual(found[0].dtype, found[1].dtype)
        self.assertEqual(found[0].shape, found[1].shape)
        masks = [layer.compute_mask(_TOKENS) for layer in layers]
        self.assertAllEqual(*masks)

    @parameterized.product(
        num_shards=(1, 3), dtype=("uint8", "int16", "uint64", "float32")
    )
    def test_numbers_of_rows_may_have_any_dtype(self, num_shards, dtype):
        # Small integers, as maps of labels have, once were an error.
        layer = sharded(num_shards)
        self.assertAllEqual(layer(tf.constant(_TOKENS, dtype)), layer(_TOKENS))

    def test_sizes_are_checked(self):
        kind = tfscale.layers.ShardedEmbedding
        for arguments, words in {
            (0, 2): "input_dim=0",
            (2, 2.0): "output_dim=2.0",
        }.items():
            with self.assertRaisesRegex((TypeError, ValueError), words):
                kind(*arguments)
        with self.assertRaisesRegex(ValueError, "num_shards=4, input_dim=3"):
            kind(3, 2, num_shards=4).build()


if __name__ == "__main__":
    tf.test.main()
