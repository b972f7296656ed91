"""What rules of sharded layers rely on in layers of Keras and keras_hub."""

import contextlib
import importlib

import keras
import tensorflow as tf
from absl.testing import parameterized

from tests._internals import check_test
from tests._internals.contracts import holds
from tests._internals.contracts import recording
from tfscale._internals import layers
from tfscale._internals import releases

# Names that Keras 3.15 has not.
_NEW = () if releases.IS_3_15 else ("_quantization_type_owner",)
_METHODS = ("_compute_attention_mask", "_compute_attention", "_masked_softmax")


class WeightsTest(tf.test.TestCase, parameterized.TestCase):
    def test_a_weight_is_without_what_lora_adds(self):
        for layer, x, name in (
            (keras.layers.Dense(2), tf.ones((1, 3)), "kernel"),
            (
                keras.layers.EinsumDense("ab,bc->ac", 2),
                tf.ones((1, 3)),
                "kernel",
            ),
            (keras.layers.Embedding(4, 2), tf.zeros((1, 1)), "embeddings"),
            (keras.layers.Conv1D(2, 1), tf.ones((1, 3, 3)), "kernel"),
        ):
            with self.subTest(layer.name):
                layer(x)
                weight = layers.weight_of(layer, name)
                self.assertIs(weight, getattr(layer, name))
                layer.enable_lora(1)
                self.assertIs(layers.weight_of(layer, name), weight)
                self.assertIsNot(getattr(layer, name), weight)
                self.assertFalse(weight.trainable)
                new = tf.ones(weight.shape)
                copy = layers.with_weight(layer, name, new, lora_enabled=False)
                self.assertIs(getattr(copy, name), new)

    @holds("layer.Layer", *_NEW)
    def test_layers_of_keras_are_quantized_and_subclasses_are_not(self):
        class Subclass(keras.layers.Dense):
            pass

        for layer, is_quantized in (
            (keras.layers.Dense(1), True),
            (Subclass(1), False),
        ):
            layer.build((None, 2))
            self.assertEqual(
                releases.is_quantized_as_it_is(layer), is_quantized
            )
            with contextlib.ExitStack() as stack:
                if not is_quantized:
                    stack.enter_context(self.assertRaises(NotImplementedError))
                layer.quantize("int8")

    def test_a_convolution_is_one_method_of_its_class(self):
        calls = []
        kind = recording(keras.layers.Conv2D, ("convolution_op",), calls)
        kind(1, 1)(tf.ones((1, 2, 2, 1)))
        self.assertEqual(calls, ["convolution_op"])

    @holds("BatchNormalization", "_moments")
    def test_batch_norm_takes_its_moments_in_one_method(self):
        calls = []
        kind = recording(keras.layers.BatchNormalization, ("_moments",), calls)
        layer = kind(momentum=0.0)
        x = tf.constant([[1.0], [3.0]])
        layer(x, training=False)
        self.assertEmpty(calls)
        layer(x, training=True)
        self.assertEqual(calls, ["_moments"])
        mean, variance = layers.moments(layer, x, None)
        self.assertAllEqual(layer.moving_mean, mean)
        self.assertAllEqual(layer.moving_variance, variance)

    @holds("BatchNormalization", "_update_renorm_statistics")
    def test_batch_norm_renews_its_statistics_in_one_method(self):
        calls = []
        kind = recording(
            keras.layers.BatchNormalization,
            ("_update_renorm_statistics",),
            calls,
        )
        layer = kind(renorm=True)
        x = tf.constant([[1.0], [3.0]])
        layer(x, training=False)
        self.assertEmpty(calls)
        before = layer.get_weights()
        layer(x, training=True)
        self.assertEqual(calls, ["_update_renorm_statistics"])
        self.assertNotAllClose(layer.get_weights()[-1], before[-1])


class AttentionTest(tf.test.TestCase, parameterized.TestCase):
    def check(self, kind, make, repeats):
        calls = []
        layer = make(
            recording(
                kind,
                _METHODS,
                calls,
            )
        )
        x = tf.random.stateless_normal((2, 3, 4), (0, 1))
        layer(x, x, use_causal_mask=True)
        self.assertEqual(
            calls,
            list(_METHODS),
        )
        # A subclass may override what projects, masks and adds up.
        methods = layers.private_methods(layers.attention_class(layer))
        self.assertContainsSubset(_METHODS, methods)
        names = ("query", "key", "value", "attention_output")
        for name in names:
            dense = layers.attention_dense(layer, name)
            self.assertIsInstance(dense, keras.layers.EinsumDense)
        # The output projection adds up over the heads that queries have.
        query = layers.attention_dense(layer, "query")
        output = layers.attention_dense(layer, "attention_output")
        self.assertEqual(query.kernel.shape[1], output.kernel.shape[0])
        self.assertIsNone(layers.attention_dense(layer, "gate"))
        self.assertEqual(layers.num_attention_axes(layer), 1)
        names = layers.attention_names(layer)
        self.assertEqual(names.repeats, repeats)
        self.assertTrue(repeats is None or hasattr(layer, repeats))

    @holds("MultiHeadAttention", "_compute_attention_mask")
    def test_multi_head_attention(self):
        self.check(
            keras.layers.MultiHeadAttention,
            lambda kind: kind(2, 2, flash_attention=False, dropout=0.1),
            None,
        )

    @holds("GroupedQueryAttention", "_compute_attention_mask")
    def test_grouped_query_attention(self):
        self.check(
            keras.layers.GroupQueryAttention,
            lambda kind: kind(2, 4, 2, flash_attention=False, dropout=0.1),
            "num_repeats",
        )


class HubTest(tf.test.TestCase):
    @holds("llama_attention.py", *check_test.names_in("llama_attention.py"))
    @holds("mistral_attention.py", *check_test.names_in("mistral_attention.py"))
    @holds("qwen_attention.py", *check_test.names_in("qwen_attention.py"))
    @holds("gemma_attention.py", *check_test.names_in("gemma_attention.py"))
    @holds("gemma3_attention.py", *check_test.names_in("gemma3_attention.py"))
    @holds("llama_decoder.py", "_compute_self_attention_mask")
    @holds("qwen_decoder.py", "_compute_self_attention_mask")
    @holds("mistral_transformer_decoder.py", "_compute_self_attention_mask")
    @holds("transformer_decoder.py", "_compute_self_attention_mask")
    @holds("gemma_decoder_block.py", "_compute_attention_mask")
    @holds("gemma3_decoder_block.py", "_compute_attention_mask")
    def test_methods_are_called_and_attributes_set_by_the_classes(self):
        # How they are used is seen where the models train: models_test.py.
        for package, path, name in check_test.ROWS:
            if package != "keras_hub":
                continue
            module = importlib.import_module(
                path.removesuffix(".py").replace("/", ".")
            )
            kinds = [
                kind
                for kind in vars(module).values()
                if isinstance(kind, type)
                and kind.__module__ == module.__name__
                and issubclass(kind, keras.layers.Layer)
            ]
            with self.subTest(f"{path}: {name}"):
                self.assertTrue(
                    any(
                        name in member.__code__.co_names
                        for kind in kinds
                        for member in vars(kind).values()
                        if hasattr(member, "__code__")
                    )
                )


if __name__ == "__main__":
    tf.test.main()
