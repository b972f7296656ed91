"""Grouped-query attention whose key/value heads the ranks cannot divide."""

import functools

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tfscale.adapters.layer import MeshLayer

# Key/value heads of 12 query heads, ranks, replicas. With 4 heads a rank of
# three has those of one and a third, with 6 each rank of four those of 1.5.
SIZES = (
    (1, 2, 1),
    (1, 4, 1),
    (2, 3, 1),
    (2, 4, 1),
    (4, 3, 1),
    (6, 4, 1),
    (3, 2, 2),
)
LAYOUTS = {
    ".*attention.*/query/kernel": (None, "model", None),
    ".*attention.*/gate/kernel": (None, "model", None),
    ".*attention.*/attention_output/kernel": ("model", None, None),
}


def grouped(num_key_value_heads, num_layers=2):
    """Layers of self-attention."""
    x = inputs = keras.Input((5, 8))
    for index in range(num_layers):
        y = keras.layers.GroupQueryAttention(
            2,
            12,
            num_key_value_heads,
            use_gate=True,
            name=f"attention_{index}",
        )(x, x, use_causal_mask=True)
        x = keras.layers.Add()([x, y])
    return keras.Model(inputs, x)


def crossed(num_key_value_heads):
    """Other keys than values, masks of heads, scores that are made use of."""
    inputs = keras.Input((5, 8))
    other = keras.layers.Dense(8, name="other")(inputs)
    least = keras.ops.reshape(keras.ops.linspace(-2.0, -1.0, 12), (12, 1, 1))
    mask = keras.ops.greater(keras.ops.expand_dims(inputs[..., :1], 1), least)
    y, scores = keras.layers.GroupQueryAttention(
        2, 12, num_key_value_heads, use_gate=True, name="attention"
    )(
        query=inputs,
        value=other,
        key=inputs,
        attention_mask=mask,
        return_attention_scores=True,
    )
    scores = keras.ops.mean(keras.ops.square(scores), axis=(1, 3))
    return keras.Model(
        inputs, keras.ops.add(y, keras.ops.expand_dims(scores, -1))
    )


class Subclassed(keras.Model):
    """Analysis sees nothing of it."""

    def __init__(self, num_key_value_heads):
        super().__init__(name="subclassed")
        self.attention = keras.layers.GroupQueryAttention(
            2, 12, num_key_value_heads, use_gate=True, name="attention"
        )

    def build(self, input_shape):
        self.attention.build(input_shape, input_shape)

    def call(self, x):
        return self.attention(x, x)


def subclassed(num_key_value_heads):
    model = Subclassed(num_key_value_heads)
    model.build((None, 5, 8))
    return model


KINDS = {
    "one_layer": functools.partial(grouped, num_layers=1),
    "grouped": grouped,
    "crossed": crossed,
    "subclassed": subclassed,
}


def vectors(build):
    random = np.random.RandomState(0)
    return same_numbers.Job(
        build,
        dict(
            x=random.randn(32, 5, 8).astype("float32"),
            y=random.randn(32, 5, 8).astype("float32"),
            batch_size=16,
        ),
    )


HUB = {
    "llama": (keras_hub.models.LlamaBackbone, {}),
    "mistral": (keras_hub.models.MistralBackbone, {"sliding_window": 4}),
    "qwen": (keras_hub.models.QwenBackbone, {}),
    # Of these, the number of heads is in what they compute.
    "gemma": (keras_hub.models.GemmaBackbone, {"head_dim": 4}),
    "gemma3": (
        keras_hub.models.Gemma3Backbone,
        {"head_dim": 4, "image_size": 16, "use_query_key_norm": True},
    ),
}
HEADS_FIRST = {
    ".*attention.*/(query|key|value)/kernel": ("model", None, None),
    ".*attention.*/attention_output/kernel": ("model", None, None),
}


def hub(name, num_key_value_heads=1):
    kind, options = HUB[name]
    backbone = kind(
        vocabulary_size=24,
        num_layers=1,
        num_query_heads=4,
        num_key_value_heads=num_key_value_heads,
        hidden_dim=16,
        intermediate_dim=24,
        **options,
    )
    logits = backbone.token_embedding(backbone.output, reverse=True)
    return keras.Model(backbone.inputs, logits, name=name)


def tokens(name, num_key_value_heads=1):
    random = np.random.RandomState(0)
    ids = random.randint(0, 24, (32, 6))
    return same_numbers.Job(
        functools.partial(hub, name, num_key_value_heads),
        dict(
            x={"token_ids": ids, "padding_mask": np.ones((32, 6), "int32")},
            y=random.randn(32, 6, 24).astype("float32"),
            batch_size=16,
        ),
    )


@functools.cache
def one_device(kind, heads):
    return same_numbers.on_one_device(
        vectors(functools.partial(KINDS[kind], heads))
    )


@functools.cache
def one_device_of_hub(name):
    return same_numbers.on_one_device(tokens(name))


class SameNumbersTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("one_layer", *SIZES[0]),
        *(("grouped", *size) for size in SIZES),
        ("crossed", 2, 4, 1),
        ("crossed", 4, 3, 1),
        ("subclassed", 2, 4, 1),
        ("subclassed", 4, 2, 2),
    )
    @pytest.mark.crossing(every=12)
    def test_of_one_device(self, kind, heads, num_ranks, num_replicas):
        job = vectors(functools.partial(KINDS[kind], heads))
        outcome = same_numbers.on_ranks(
            job, num_ranks, num_replicas, layouts=LAYOUTS
        )
        same_numbers.assert_same(
            self, one_device(kind, heads), outcome, unmoved=("key_bias",)
        )
        self.assert_sharded(outcome.model, num_ranks)

    @parameterized.product(name=list(HUB), num_ranks=[2, 4])
    @pytest.mark.crossing
    def test_of_one_device_in_keras_hub(self, name, num_ranks):
        job = tokens(name)
        layouts = {k: v for k, v in LAYOUTS.items() if "gate" not in k}
        if "gemma" in name:
            layouts[".*attention.*/query/kernel"] = ("model", None, None)
        if name == "qwen":
            layouts[".*attention.*/query/bias"] = ("model", None)
        outcome = same_numbers.on_ranks(job, num_ranks, layouts=layouts)
        same_numbers.assert_same(self, one_device_of_hub(name), outcome)
        self.assert_sharded(outcome.model, num_ranks)

    @parameterized.parameters("gemma", "gemma3")
    @pytest.mark.crossing
    def test_of_one_device_with_keys_divided_too(self, name):
        job = tokens(name, 2)
        expected = same_numbers.on_one_device(job)
        outcome = same_numbers.on_ranks(job, 2, 2, layouts=HEADS_FIRST)
        same_numbers.assert_same(self, expected, outcome)
        self.assert_sharded(outcome.model, 2, keys=True)

    def assert_sharded(self, model, num_ranks, keys=False):
        layers = list(model._flatten_layers())
        self.assertIn("query", [layer.name for layer in layers])
        for layer in layers:
            if layer.name == "query":
                self.assertTrue(layer.sharded_call.rule.is_inner)
                self.assertTrue(layer.sharded_call.rule.stays_sharded)
            if layer.name == "key":
                self.assertEqual(isinstance(layer, MeshLayer), keys)


class WithoutGatherTest(tf.test.TestCase):
    def test_no_rank_computes_another_ones_heads(self):
        mesh = tfscale.device_mesh(model=4)
        layout_map = keras.distribution.LayoutMap(mesh)
        for pattern, layout in LAYOUTS.items():
            layout_map[pattern] = layout
        layout_map[".*/(query|gate)/bias"] = ("model", None)
        strategy = tfscale.MeshStrategy(mesh, layout_map)
        with strategy.scope():
            # 12 heads in all, 3 on each rank, and no other dim like these.
            model = grouped(2, num_layers=1)

        @tf.function(autograph=False)
        def run(x):
            return strategy.run(model, (x,))

        graph = run.get_concrete_function(tf.ones((16, 5, 8))).graph
        shapes = [
            tuple(tensor.shape.as_list())
            for op in graph.get_operations()
            for tensor in op.outputs
            if tensor.shape.rank is not None
        ]
        self.assertIn((16, 5, 3, 2), shapes)
        self.assertFalse([shape for shape in shapes if 12 in shape])


if __name__ == "__main__":
    tf.test.main()
