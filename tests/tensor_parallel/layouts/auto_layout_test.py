import warnings

import keras
import keras_hub
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from keras import layers

import tfscale
from examples.gpt import build_gpt
from tfscale.tensor_parallel.layouts.auto_layout import auto_layout_map
from tfscale.tensor_parallel.layouts.layouts import Layouts

COLUMN = (None, "model")
ROW = ("model", None)
BIAS = ("model",)
# Of kernels (width, heads, head_dim) and (heads, head_dim, width).
HEADS = (None, "model", None)
FROM_HEADS = ("model", None, None)


def sharded(model, ranks=2):
    """Axes of all variables that are sharded, by path."""
    mesh = tfscale.device_mesh(model=ranks)
    layout_map = auto_layout_map(model, mesh)
    found = {v.path: layout_map[v.path] for v in model.variables}
    return {path: each.axes for path, each in found.items() if each}


def attention(name, biases=True, shared_heads=True):
    """What is expected of an attention layer of this name."""
    own = ("query", "key", "value") if shared_heads else ("query",)
    return {
        f"{name}/attention_output/kernel": FROM_HEADS,
        **{f"{name}/{each}/kernel": HEADS for each in own},
        **{f"{name}/{each}/bias": ROW for each in own if biases},
    }


def mlp(up, down, biases=True):
    """What is expected of a pair of Dense layers."""
    layout = {f"{up}/kernel": COLUMN, f"{down}/kernel": ROW}
    return layout | ({f"{up}/bias": BIAS} if biases else {})


def chain(*steps, width=8):
    """A functional model called "m" of layers one after the other."""
    x = inputs = keras.Input((width,))
    for step in steps:
        x = step(x)
    return keras.Model(inputs, x, name="m")


def dense(units, name, **kwargs):
    return layers.Dense(units, name=name, **kwargs)


class MlpTest(parameterized.TestCase):
    def test_sequential(self):
        model = keras.Sequential(
            [
                keras.Input((784,)),
                dense(512, "a", activation="relu"),
                layers.Dropout(0.1),
                dense(512, "b"),
                layers.LayerNormalization(),
                dense(10, "c"),
            ],
            name="s",
        )
        self.assertEqual(sharded(model), mlp("s/a", "s/b"))

    @parameterized.parameters(
        # Layers in between, whether they keep the pair.
        ([], True),
        ([layers.ReLU, layers.Identity], True),
        ([lambda: layers.Activation("gelu")], True),
        ([lambda: keras.ops.silu, lambda: keras.ops.square], True),
        ([lambda: layers.Activation("softmax")], False),
        ([layers.Softmax], False),
        ([layers.LayerNormalization], False),
        ([lambda: layers.Reshape((4, 4)), layers.Flatten], False),
        ([lambda: keras.ops.sort], False),
    )
    def test_what_may_be_in_between(self, between, keeps):
        model = chain(dense(16, "a"), *[f() for f in between], dense(4, "b"))
        if keeps:
            self.assertEqual(sharded(model), mlp("a", "b"))
        else:
            with self.assertRaisesRegex(ValueError, "no attention, MLP"):
                sharded(model)

    def test_activation_over_all_units_keeps_its_layer_whole(self):
        model = chain(dense(16, "a", activation="softmax"), dense(4, "b"))
        with self.assertRaisesRegex(ValueError, "no attention, MLP"):
            sharded(model)

    def test_layers_are_in_one_pair_and_pairs_with_most_weights_first(self):
        model = chain(*[dense(n, f"d{n}") for n in (16, 64, 32, 6, 4)])
        # 8-16-64-32-6-4: 16-64-32 has the most weights, then 32-6-4.
        self.assertEqual(
            sharded(model), mlp("d64", "d32") | mlp("d6", "d4"), model.name
        )

    def test_gate_is_divided_as_what_it_gates(self):
        x = keras.Input((8,))
        gate, up = dense(16, "gate")(x), dense(16, "up")(x)
        y = dense(8, "down")(keras.ops.silu(gate) * up)
        self.assertEqual(
            sharded(keras.Model(x, y)),
            mlp("gate", "down") | mlp("up", "down"),
        )

    def test_hidden_units_that_others_use_too_are_whole(self):
        x = keras.Input((8,))
        hidden = dense(16, "a")(x)
        head = dense(4, "b")(hidden)
        for outputs in (
            [head, hidden],
            [head, layers.LayerNormalization()(hidden)],
        ):
            with self.assertRaisesRegex(ValueError, "no attention, MLP"):
                sharded(keras.Model(x, outputs))

    def test_residual_is_no_mlp(self):
        x = keras.Input((8,))
        y = dense(4, "b")(x + dense(8, "a")(x))
        with self.assertRaisesRegex(ValueError, "no attention, MLP"):
            sharded(keras.Model(x, y))

    def test_layer_that_is_called_twice_is_in_no_pair(self):
        twice = dense(8, "twice")
        with self.assertRaisesRegex(ValueError, "no attention, MLP"):
            sharded(chain(twice, twice))

    def test_einsum_dense_counts_as_dense(self):
        x = keras.Input((3, 8))
        up = layers.EinsumDense(
            "abc,dc->abd", (None, 16), bias_axes="d", name="up"
        )
        down = layers.EinsumDense("...d,dc->...c", 8, name="down")
        self.assertEqual(
            sharded(keras.Model(x, down(up(x)))),
            {
                "up/kernel": ("model", None),
                "up/bias": BIAS,
                "down/kernel": ("model", None),
            },
        )

    def test_grouped_and_quantized_kernels_are_whole(self):
        x = keras.Input((4, 8))
        grouped = layers.EinsumDense("agc,gcd->agd", (4, 16), name="grouped")
        quantized = [dense(16, "a"), dense(8, "b")]
        y = dense(8, "down")(dense(16, "up")(grouped(x)))
        for layer in quantized:
            y = layer(y)
            layer.quantize("int8")
        self.assertEqual(sharded(keras.Model(x, y)), mlp("up", "down"))

    def test_nested_models_are_opened_up(self):
        inner = chain(dense(16, "a"), dense(8, "b"))
        outer = keras.Sequential([keras.Input((8,)), inner], name="outer")
        self.assertEqual(sharded(outer), mlp("a", "b"))


class Block(layers.Layer):
    """What hides its MLPs from Keras."""

    def __init__(self, sizes, **kwargs):
        super().__init__(**kwargs)
        self.sublayers = [
            dense(units, f"d{index}") for index, units in enumerate(sizes)
        ]

    def call(self, x):
        for layer in self.sublayers:
            x = layer(x)
        return x


class SubclassedTest(parameterized.TestCase):
    @parameterized.parameters(
        # Sizes from 8 units on, pairs
        ((16, 8), [(0, 1)]),
        ((16, 8, 16, 8), [(0, 1), (2, 3)]),
        ((4, 2), [(0, 1)]),
        # Square matrices could be anything, such as queries and keys.
        ((8, 16, 8), [(1, 2)]),
    )
    def test_siblings_pair_by_shapes_and_order(self, sizes, pairs):
        model = chain(Block(sizes, name="block"))
        expected = {}
        for up, down in pairs:
            expected |= mlp(f"block/d{up}", f"block/d{down}")
        self.assertEqual(sharded(model), expected)

    def test_square_siblings_are_whole(self):
        with self.assertRaisesRegex(ValueError, "no attention, MLP"):
            sharded(chain(Block((8, 8, 8, 8))))

    def test_model_with_a_call_of_its_own(self):
        class Model(keras.Model):
            def __init__(self):
                super().__init__(name="own")
                self.blocks = [Block((16, 8), name=f"b{i}") for i in range(2)]
                self.head = dense(3, "head")

            def call(self, x):
                for block in self.blocks:
                    x = block(x)
                return self.head(x)

        model = Model()
        with self.assertRaisesRegex(ValueError, "must be built.*'own'"):
            sharded(model)
        model(keras.ops.ones((2, 8)))
        self.assertEqual(
            sharded(model),
            mlp("own/b0/d0", "own/b0/d1") | mlp("own/b1/d0", "own/b1/d1"),
        )


class AttentionTest(parameterized.TestCase):
    def test_multi_head_attention(self):
        x = keras.Input((4, 16))
        y = layers.MultiHeadAttention(4, 3, value_dim=5, name="mha")(x, x)
        self.assertEqual(sharded(keras.Model(x, y)), attention("mha"))

    @parameterized.parameters((2, True), (1, False), (4, True))
    def test_grouped_query_attention(self, key_value_heads, divides):
        x = keras.Input((4, 16))
        y = layers.GroupQueryAttention(3, 4, key_value_heads, name="gqa")(x, x)
        # Whole keys and values come without a warning, which would raise.
        self.assertEqual(
            sharded(keras.Model(x, y)),
            attention("gqa", shared_heads=divides),
        )

    def test_heads_that_the_axis_does_not_divide_are_whole_and_said(self):
        x = keras.Input((4, 16))
        y = layers.MultiHeadAttention(6, 3, name="mha")(x, x)
        y = dense(16, "down")(dense(64, "up")(y))
        model = keras.Model(x, y)
        with self.assertWarnsRegex(
            UserWarning,
            r"4 ranks.*the 6 heads of mha/attention_output, which 4 does not "
            r"divide \(8 would do\)",
        ):
            self.assertEqual(sharded(model, 4), mlp("up", "down"))


class EmbeddingTest(parameterized.TestCase):
    def _model(self, rows, units, name="tokens", embedding=layers.Embedding):
        tokens = keras.Input((4,), dtype="int32")
        x = embedding(rows, 8, name=name)(tokens)
        x = layers.LayerNormalization()(x)
        return keras.Model(tokens, dense(units, "head")(x))

    def test_rows_are_sharded(self):
        self.assertEqual(
            sharded(self._model(rows=50, units=3)), {"tokens/embeddings": ROW}
        )

    def test_head_with_as_many_units_as_there_are_rows_is_too(self):
        self.assertEqual(
            sharded(self._model(rows=50, units=50)),
            {
                "tokens/embeddings": ROW,
                "head/kernel": COLUMN,
                "head/bias": BIAS,
            },
        )

    @parameterized.parameters("positions", "segment_embedding", "Token_Type")
    def test_positions_and_the_like_are_whole(self, name):
        with self.assertRaisesRegex(ValueError, "no attention, MLP"):
            sharded(self._model(rows=50, units=3, name=name))

    def test_rows_that_the_axis_does_not_divide(self):
        with self.assertRaisesRegex(
            ValueError,
            r"the 51 rows of tokens, which 2 does not divide \(52 would do\)",
        ):
            sharded(self._model(rows=51, units=51))

    def test_reversible_embedding(self):
        def untied(rows, width, name):
            return layers.ReversibleEmbedding(
                rows, width, tie_weights=False, name=name
            )

        self.assertEqual(
            sharded(self._model(50, 3, embedding=untied)),
            {
                "tokens/embeddings": ROW,
                "tokens/reverse_embeddings": COLUMN,
            },
        )


def small(kind, **kwargs):
    return kind(
        vocabulary_size=50,
        num_layers=2,
        hidden_dim=8,
        intermediate_dim=24,
        **kwargs,
    )


def small_gpt2(**kwargs):
    return small(keras_hub.models.GPT2Backbone, max_sequence_length=8, **kwargs)


class TransformersTest(parameterized.TestCase):
    def test_gpt_of_the_examples(self):
        expected = {"tokens_embedding/embeddings": ROW}
        for index in range(2):
            name = f"block_{index}"
            expected |= attention(f"{name}_attention")
            expected |= mlp(f"{name}_mlp_up", f"{name}_mlp_down")
        expected |= {"logits/kernel": COLUMN, "logits/bias": BIAS}
        self.assertEqual(sharded(build_gpt(2, 16, 2, 8, 0.1)), expected)

    def test_gpt2(self):
        expected = {"token_embedding/embeddings": ROW}
        for index in range(2):
            name = f"transformer_layer_{index}"
            expected |= attention(f"{name}/self_attention")
            expected |= mlp(
                f"{name}/feedforward_intermediate_dense",
                f"{name}/feedforward_output_dense",
            )
        self.assertEqual(sharded(small_gpt2(num_heads=2)), expected)

    def test_gpt2_that_four_ranks_divide_in_part(self):
        with self.assertWarnsRegex(
            UserWarning,
            r"the 50 rows of token_embedding, which 4 .* \(52 would do\); "
            "the 2 heads of transformer_layer_0/self_attention",
        ):
            found = sharded(small_gpt2(num_heads=2), ranks=4)
        expected = {}
        for index in range(2):
            name = f"transformer_layer_{index}"
            expected |= mlp(
                f"{name}/feedforward_intermediate_dense",
                f"{name}/feedforward_output_dense",
            )
        self.assertEqual(found, expected)

    @parameterized.parameters((2, True), (1, False))
    def test_llama(self, key_value_heads, divides):
        backbone = small(
            keras_hub.models.LlamaBackbone,
            num_query_heads=4,
            num_key_value_heads=key_value_heads,
        )
        expected = {
            "token_embedding/embeddings": ROW,
            "token_embedding/reverse_embeddings": COLUMN,
        }
        for index in range(2):
            name = f"transformer_layer_{index}"
            expected |= attention(
                f"{name}/self_attention", biases=False, shared_heads=divides
            )
            for up in ("intermediate", "gate"):
                expected |= mlp(
                    f"{name}/feedforward_{up}_dense",
                    f"{name}/feedforward_output_dense",
                    biases=False,
                )
        self.assertEqual(sharded(backbone), expected)
        task = keras_hub.models.LlamaCausalLM(backbone)
        self.assertEqual(sharded(task), expected)

    def test_bert(self):
        backbone = small(
            keras_hub.models.BertBackbone, num_heads=2, max_sequence_length=8
        )
        expected = {"token_embedding/embeddings": ROW}
        for index in range(2):
            name = f"transformer_layer_{index}"
            expected |= attention(f"{name}/self_attention_layer")
            expected |= mlp(
                f"{name}/feedforward_intermediate_dense",
                f"{name}/feedforward_output_dense",
            )
        self.assertEqual(sharded(backbone), expected)

    def test_gemma_whose_kernels_have_the_heads_first(self):
        backbone = small(
            keras_hub.models.GemmaBackbone,
            num_query_heads=4,
            num_key_value_heads=1,
            head_dim=4,
        )
        expected = {"token_embedding/embeddings": ROW}
        for index in range(2):
            name = f"decoder_block_{index}"
            expected |= {
                f"{name}/attention/query/kernel": FROM_HEADS,
                f"{name}/attention/attention_output/kernel": FROM_HEADS,
                f"{name}/ffw_gating/kernel": COLUMN,
                f"{name}/ffw_gating_2/kernel": COLUMN,
                f"{name}/ffw_linear/kernel": ROW,
            }
        self.assertEqual(sharded(backbone), expected)

    @parameterized.parameters(
        (keras_hub.models.BloomBackbone, "output_dense"),
        (keras_hub.models.GPTNeoXBackbone, "attention_output"),
    )
    def test_heads_that_are_one_dim_before_the_output(self, kind, output):
        found = sharded(small(kind, num_heads=2))
        into = {
            "output_dense": ["query_dense", "key_dense", "value_dense"],
            "attention_output": ["query_key_value"],
        }[output]
        name = "transformer_layer_1/self_attention"
        self.assertEqual(
            {p: axes for p, axes in found.items() if p.startswith(name)},
            {
                f"{name}/{output}/kernel": ROW,
                **{f"{name}/{each}/kernel": HEADS for each in into},
                **{f"{name}/{each}/bias": ROW for each in into},
            },
        )

    @parameterized.parameters(
        (keras_hub.models.MixtralBackbone, "mixtral", ("gate", "intermediate")),
        # Here a gate and what it gates are one weight.
        (keras_hub.models.QwenMoeBackbone, "qwen", ("gate",)),
    )
    def test_experts(self, kind, name, ups):
        # 80 % of Mixtral's weights were whole.
        options = {
            "mixtral": {},
            "qwen": dict(
                moe_intermediate_dim=6, shared_expert_intermediate_dim=12
            ),
        }
        backbone = small(
            kind,
            num_query_heads=4,
            num_key_value_heads=2,
            num_experts=4,
            top_k=2,
            **options[name],
        )
        experts = f"transformer_layer_0/{name}_sparse_moe_block/experts"
        self.assertEqual(
            {p: a for p, a in sharded(backbone).items() if experts in p},
            {
                f"{experts}/expert_feedforward_{each}_dense": FROM_HEADS
                for each in (*ups, "output")
            },
        )

    @pytest.mark.crossing
    def test_t5_whose_heads_are_units_of_dense_layers(self):
        with warnings.catch_warnings():
            # Of Keras, of a mask that its attention does not pass on.
            warnings.simplefilter("ignore")
            backbone = keras_hub.models.T5Backbone(
                24, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=16
            )
        expected = {}
        for name in ("self_attention", "cross_attention"):
            path = f"transformer_decoder_layer_0/{name}"
            for each in ("query", "key", "value"):
                expected[f"{path}/{each}_projector/kernel"] = COLUMN
            expected[f"{path}/output_projector/kernel"] = ROW
        self.assertEqual(
            {p: a for p, a in sharded(backbone).items() if p in expected},
            expected,
        )


class FunctionTest(absltest.TestCase):
    def build(self):
        return keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(8),
                layers.Dropout(0.5),
                layers.Dense(4),
            ]
        )

    def test_the_next_model_has_the_names_and_weights_that_it_would_have(self):
        self.build()  # so that the next names have numbers
        keras.utils.set_random_seed(3)
        alone = self.build()
        keras.utils.clear_session(free_memory=False)
        self.build()
        keras.utils.set_random_seed(3)
        mesh = tfscale.device_mesh(model=2)
        layout_map = auto_layout_map(self.build, mesh)
        strategy = tfscale.MeshStrategy(mesh, layout_map)
        with strategy.scope():
            # In a scope too: it is not built for this one.
            again = auto_layout_map(self.build, mesh)
            model = self.build()
            lines = []
            tfscale.sharding_summary(model, print_fn=lines.append)
        self.assertEqual(list(again), list(layout_map))
        self.assertEqual(
            [v.path for v in model.variables], [v.path for v in alone.variables]
        )
        for expected, found in zip(alone.weights, model.weights):
            np.testing.assert_array_equal(found, expected)
        self.assertEqual(lines[0].count("output sharded"), 1)

    def test_what_it_returns_is_checked(self):
        with self.assertRaisesRegex(TypeError, "or a function that.*<Dense"):
            sharded(lambda: layers.Dense(2))
        with self.assertRaisesRegex(ValueError, "must be built.*'fresh'"):
            sharded(lambda: keras.Sequential([dense(3, "a")], name="fresh"))


class WarningTest(absltest.TestCase):
    def test_nobody_is_told_to_change_a_map_that_was_found(self):
        # Its attention adds a bias of all heads, so they are put together.
        def build():
            return small(keras_hub.models.BloomBackbone, num_heads=2)

        mesh = tfscale.device_mesh(model=2)
        layout_map = auto_layout_map(build, mesh)
        with tfscale.MeshStrategy(mesh, layout_map).scope():
            model = build()
        lines = []
        # A warning would be an error.
        tfscale.sharding_summary(model, print_fn=lines.append)
        self.assertIn("Gathered, transformer_layer_0/self_attention", lines[0])


class MapTest(absltest.TestCase):
    def test_keys_are_the_paths_as_regular_expressions(self):
        model = chain(dense(16, "a.b"), dense(8, "c"))
        layout_map = auto_layout_map(model, tfscale.device_mesh(model=2))
        self.assertEqual(
            list(layout_map), [r"^a\.b/kernel$", "^a\\.b/bias$", "^c/kernel$"]
        )

    def test_layouts_take_it(self):
        model = build_gpt(2, 16, 2, 8, 0.1)
        mesh = tfscale.device_mesh(model=2)
        layouts = Layouts(auto_layout_map(model, mesh), mesh)
        dims = {
            v.path: layouts.split_dim(v.path, v.shape) for v in model.weights
        }
        layouts.check_all_matched(model.variables)
        self.assertEqual(
            {path: dim for path, dim in dims.items() if dim is not None},
            {
                path: axes.index("model")
                for path, axes in sharded(model).items()
            },
        )

    def test_one_path_for_variables_of_different_layouts(self):
        inner = [
            keras.Sequential([keras.Input((8,)), *each], name="same")
            for each in (
                [dense(16, "a"), dense(8, "b")],
                [dense(8, "a", activation="softmax"), dense(8, "c")],
            )
        ]
        x = keras.Input((8,))
        model = keras.Model(x, inner[0](x) + keras.Sequential([inner[1]])(x))
        with self.assertWarnsRegex(
            UserWarning, "same/a/kernel, the path of several"
        ):
            self.assertEqual(sharded(model), {"same/b/kernel": ROW})

    def test_axis_of_size_one_divides_everything(self):
        model = chain(dense(5, "a"), dense(3, "b"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertEqual(sharded(model, ranks=1), mlp("a", "b"))


class BuiltAsideTest(parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_values_are_made_only_if_the_function_needs_them(self, reads):
        # A model for many devices may not fit into the host's memory.
        models = []

        def build_model():
            model = keras.Sequential(
                [
                    keras.Input((8,)),
                    layers.Dense(16, activation="relu", name="up"),
                    layers.Dropout(0.1),
                    layers.Dense(8, name="down"),
                ],
                name="mlp",
            )
            models.append(model)
            if reads:
                model.scale = keras.Variable(np.ones(3), trainable=False)
            return model

        mesh = tfscale.device_mesh(model=2)
        found = auto_layout_map(build_model, mesh)
        self.assertEqual(
            list(found),
            ["^mlp/up/kernel$", "^mlp/up/bias$", "^mlp/down/kernel$"],
        )
        for variable in models[-1].variables:
            self.assertEqual(variable._value is not None, reads)


class ErrorsTest(absltest.TestCase):
    def test_not_a_model(self):
        with self.assertRaisesRegex(TypeError, "must be a `keras.Model`.*<Den"):
            sharded(layers.Dense(3))

    def test_mesh_without_a_model_axis(self):
        mesh = keras.distribution.DeviceMesh((1,), ("data",), ["cpu:0"])
        with self.assertRaisesRegex(ValueError, r"axis 'model'.*\['data'\]"):
            auto_layout_map(chain(dense(3, "a")), mesh)

    def test_model_that_is_not_built(self):
        model = keras.Sequential([dense(3, "a")], name="fresh")
        with self.assertRaisesRegex(ValueError, "must be built.*'fresh'"):
            sharded(model)

    def test_nothing_to_divide(self):
        model = chain(dense(3, "a"))
        with self.assertRaisesRegex(
            ValueError, "model 'm' and a model axis of size 2, but no attention"
        ):
            sharded(model)

    def test_nothing_that_the_axis_divides(self):
        model = chain(dense(15, "a"), dense(8, "b"))
        with self.assertRaisesRegex(
            ValueError, r"the 15 units of a, which 2 .* \(16 would do\)"
        ):
            sharded(model)


if __name__ == "__main__":
    absltest.main()
