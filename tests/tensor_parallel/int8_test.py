"""int8 layers on model ranks: the numbers of one device, to the last bit."""

import contextlib
import os
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tfscale._internals import attributes
from tfscale._internals import releases

RNG = np.random.RandomState(0)
X = RNG.normal(size=(8, 8)).astype("float32")
TOKENS = RNG.randint(0, 12, size=(4, 6))
LAYOUTS = {
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
}
HEADS = (None, "model", None)
GPT_LAYOUTS = {
    **LAYOUTS,
    ".*table/embeddings": ("model", None),
    ".*wide/embeddings": (None, "model"),
    ".*narrow/kernel": ("model", None),
    ".*(self|grouped)/query/kernel": HEADS,
    ".*self/(key|value)/kernel": HEADS,
    ".*/attention_output/kernel": ("model", None, None),
}


def mlp():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.LayerNormalization(name="norm"),
            keras.layers.Dense(16, "relu", name="up"),
            keras.layers.Dense(8, name="down"),
            keras.layers.Dense(3, name="head"),  # no layout would divide it
        ]
    )


def gpt(tie_weights=True):
    keras.utils.set_random_seed(1)
    tokens = keras.Input((6,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(
        12, 8, tie_weights=tie_weights, name="table"
    )
    wide = keras.layers.Embedding(12, 16, name="wide")(tokens)
    x = table(tokens) + keras.layers.Dense(8, name="narrow")(wide)
    attention = keras.layers.MultiHeadAttention(4, 2, name="self")
    x = x + attention(x, x, use_causal_mask=True)
    # Of fewer key/value heads than there may be ranks.
    attention = keras.layers.GroupQueryAttention(2, 4, 1, name="grouped")
    x = x + attention(x, x, use_causal_mask=True)
    x = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.Dense(8, name="down")(
        keras.layers.Dense(16, "gelu", name="up")(x)
    )
    return keras.Model(tokens, table(x, reverse=True))


MODELS = {
    "mlp": (mlp, X, LAYOUTS),
    "gpt": (gpt, TOKENS, GPT_LAYOUTS),
    "untied": (
        lambda: gpt(tie_weights=False),
        TOKENS,
        {**GPT_LAYOUTS, ".*table/reverse_embeddings": (None, "model")},
    ),
}

SEVEN_STEPS = keras.quantizers.AbsMaxQuantizer(value_range=(-7, 7), axis=-1)
SEVEN_STEPS_OF_WEIGHTS = keras.quantizers.AbsMaxQuantizer(0, (-7, 7))
LORA = ("up", "down", "self/query", "self/value", "self/attention_output")


class Halves(keras.quantizers.Quantizer):
    """A quantizer that goes by no maximum."""

    def __call__(self, x, axis=None):
        """See `keras.quantizers.Quantizer`."""
        scale = keras.ops.full_like(x[..., :1], 2.0)
        return keras.ops.cast(keras.ops.round(x * 2), "int8"), scale


def scope_of(name, **axes):
    """The scope to make a model of `MODELS` in, of one device without axes."""
    keras.utils.clear_session()
    if not axes:
        return contextlib.nullcontext()
    mesh = tfscale.device_mesh(**axes)
    layout_map = keras.distribution.LayoutMap(mesh)
    for pattern, layout in MODELS[name][2].items():
        layout_map[pattern] = layout
    return tfscale.MeshStrategy(mesh, layout_map).scope()


def int8(name, config=None, has_run=False, **axes):
    with scope_of(name, **axes):
        model = MODELS[name][0]()
        if has_run:
            model.predict(MODELS[name][1], verbose=0)
        quantize(model, config)
        if "pipeline" in axes:
            model = tfscale.PipelineModel(model, num_microbatches=2)
            model.compile()
    return model


def quantize(model, config=None, mode="int8"):
    """Quantizes, and asserts that Keras warned of no layer with weights."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.quantize(None if config else mode, config=config)
    text = "\n".join(str(warning.message) for warning in caught)
    assert "Layer Dense " not in text and "Embedding " not in text, text


def int8_paths(model):
    paths = (v.path for v in model.variables if v.dtype == "int8")
    return sorted(path.removeprefix("sequential/") for path in paths)


def num_products(model, x):
    """The products of int8 with int8 in a graph of `predict_step`."""
    strategy = model.distribute_strategy
    function = tf.function(
        lambda x: strategy.run(model.predict_step, ((x,),)), autograph=False
    )
    graph = function.get_concrete_function(tf.constant(x)).graph
    return sum(
        "MatMul" in op.type and {x.dtype for x in op.inputs} == {tf.int8}
        for op in graph.get_operations()
    )


class Int8Test(tf.test.TestCase, parameterized.TestCase):
    def assertSameAsOneDevice(
        self, name, config=None, tolerance=0.0, has_run=False, **axes
    ):
        x = MODELS[name][1]
        one = int8(name, config=config)
        # Of the rows that a replica and a microbatch have: a processor may
        # round products of float32 in attention otherwise for other shapes.
        rows = 4 // axes.get("data", 1) // (2 if "pipeline" in axes else 1)
        expected = one.predict(x, batch_size=rows, verbose=0)
        model = int8(name, config=config, has_run=has_run, **axes)
        self.assertEqual(int8_paths(model), int8_paths(one))
        found = model.predict(x, batch_size=4, verbose=0)
        self.assertAllClose(found, expected, rtol=tolerance, atol=tolerance)
        return one, model

    def test_dense_layers_on_ranks(self):
        one, model = self.assertSameAsOneDevice("mlp", model=2)
        self.assertEqual(
            {
                variable.path.removeprefix("sequential/"): tuple(shard.shape)
                for variable in model.variables
                for shard in variable.value.values[:1]
                if "/kernel" in variable.path
            },
            {
                "up/kernel": (8, 8),
                "up/kernel_scale": (8,),
                "down/kernel": (8, 8),
                "down/kernel_scale": (8,),
                "head/kernel": (8, 3),
                "head/kernel_scale": (3,),
            },
        )
        # All of them run as int8, each rank its own.
        self.assertEqual(num_products(model, X), 2 * num_products(one, X))
        self.assertEqual(num_products(one, X), 3)

    @pytest.mark.crossing
    def test_every_kind_of_layer_on_ranks(self):
        one, model = self.assertSameAsOneDevice("gpt", model=2)
        self.assertEqual(
            num_products(model, TOKENS), 2 * num_products(one, TOKENS)
        )
        self.assertEqual(num_products(one, TOKENS), 12)

    def test_layers_that_have_run_on_ranks(self):
        """Keras passed over each EinsumDense that comes sharded, silently.

        It reads the rank of an input in `input_spec`, which was None.
        """
        self.assertSameAsOneDevice("gpt", has_run=True, model=2)

    @parameterized.parameters(
        ("untied", dict(model=2)),
        ("mlp", dict(data=2, model=2)),
        ("mlp", dict(pipeline=2, model=2)),
        ("mlp", dict(data=2, pipeline=2, model=2)),
        ("gpt", dict(data=2, model=2)),
        ("gpt", dict(pipeline=2, model=2)),
    )
    @pytest.mark.crossing
    def test_in_each_combination(self, name, axes):
        self.assertSameAsOneDevice(name, **axes)

    @parameterized.named_parameters(
        # Rounding hides sums in another order, of what is not quantized.
        ("weights_only", {"activation_quantizer": None}, 1e-6),
        ("inputs_in_fewer_steps", {"activation_quantizer": SEVEN_STEPS}, 0.0),
        (
            "weights_in_fewer_steps",
            {"weight_quantizer": SEVEN_STEPS_OF_WEIGHTS},
            0.0,
        ),
    )
    @pytest.mark.crossing
    def test_quantizers_of_a_config(self, quantizers, tolerance):
        config = keras.quantizers.Int8QuantizationConfig(**quantizers)
        self.assertSameAsOneDevice("mlp", config, tolerance, model=2)

    def test_a_quantizer_of_ones_own(self):
        # Ranks cannot know how: the kernel is gathered.
        config = keras.quantizers.Int8QuantizationConfig(
            activation_quantizer=Halves()
        )
        self.assertSameAsOneDevice("mlp", config, model=2)

    @pytest.mark.crossing
    def test_low_precision(self):
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            self.assertSameAsOneDevice("mlp", model=2)
        finally:
            keras.config.set_dtype_policy("float32")

    def test_a_layer_quantized_outside_of_the_scope(self):
        with scope_of("mlp", model=2):
            model = mlp()
        model.predict(X, verbose=0)
        model.get_layer("up").quantize("int8")
        kernel = model.get_layer("up").kernel
        self.assertEqual(kernel.dtype, "int8")
        self.assertEqual(kernel.value.values[1].shape, (8, 8))

    def test_a_subclass_is_not_quantized_as_in_keras(self):
        class Mine(keras.layers.Dense):
            pass

        with scope_of("mlp", model=2):
            x = keras.Input((8,))
            up = Mine(16, name="up")(x)
            model = keras.Model(x, keras.layers.Dense(8, name="down")(up))
        said = r"Layer Mine does not have a|1 layer\(s\) were skipped.*'up'"
        with self.assertWarnsRegex(UserWarning, said):
            model.quantize("int8")
        self.assertEqual(int8_paths(model), ["down/kernel"])

    @parameterized.parameters(False, True)
    @pytest.mark.crossing(every=2)
    def test_saved_and_loaded_across_meshes(self, is_sharded):
        file = os.path.join(self.create_tempdir(), "int8.keras")
        saved = int8("mlp", **({"model": 2} if is_sharded else {}))
        expected = saved.predict(X, verbose=0)
        saved.save(file)
        with scope_of("mlp", **({} if is_sharded else {"model": 2})):
            loaded = keras.models.load_model(file)
        self.assertEqual(int8_paths(loaded), int8_paths(saved))
        self.assertAllEqual(loaded.predict(X, verbose=0), expected)

    @parameterized.parameters(("mlp", False), ("gpt", False), ("gpt", True))
    @pytest.mark.crossing
    def test_weights_saved_and_loaded_across_meshes(self, name, is_sharded):
        file = os.path.join(self.create_tempdir(), "int8.weights.h5")
        saved = int8(name, **({"model": 2} if is_sharded else {}))
        x = MODELS[name][1]
        expected = saved.predict(x, verbose=0)
        saved.save_weights(file)
        loaded = int8(name, **({} if is_sharded else {"model": 2}))
        for variable in loaded.variables:
            variable.assign(keras.ops.zeros_like(variable))
        loaded.load_weights(file)
        self.assertAllEqual(loaded.predict(x, verbose=0), expected)

    def test_keras_does_not_load_an_int8_attention(self):
        # Its config forgets what the layers inside it are: on no mesh at all.
        # When this fails, Keras has mended it, and docs can say so.
        file = os.path.join(self.create_tempdir(), "int8.keras")
        x = keras.Input((4, 8))
        attention = keras.layers.MultiHeadAttention(2, 4)
        model = keras.Model(x, attention(x, x))
        quantize(model)
        model.save(file)
        with self.assertRaisesRegex(ValueError, "4 objects could not be load"):
            keras.models.load_model(file)

    @parameterized.parameters("mlp", "gpt")
    @pytest.mark.crossing
    def test_lora_on_int8_predicts(self, name):
        x = MODELS[name][1]

        def predict(**axes):
            with scope_of(name, **axes):
                model = MODELS[name][0]()
                quantize(model)
                for layer in attributes.flatten_layers(model):
                    if (layer.path or "").endswith(LORA):
                        layer.enable_lora(2)
            random = np.random.RandomState(5)
            for variable in model.trainable_variables:
                if "lora" in variable.path:
                    variable.assign(random.normal(size=variable.shape))
            return model.predict(x, batch_size=4, verbose=0)

        found, expected = predict(model=2), predict()
        self.assertAllEqual(found, expected)

    @parameterized.parameters(
        ("mlp", dict(model=2)),
        ("mlp", dict(data=2, pipeline=2, model=2)),
        ("gpt", dict(model=2)),
    )
    @pytest.mark.crossing
    def test_lora_is_trained_on_int8(self, name, axes):
        x = MODELS[name][1]

        def train(**axes):
            with scope_of(name, **axes):
                model = plain = MODELS[name][0]()
                quantize(model)
                for layer in attributes.flatten_layers(model):
                    if (layer.path or "").endswith(LORA):
                        layer.enable_lora(2)
                if "pipeline" in axes:
                    model = tfscale.PipelineModel(model, num_microbatches=2)
                optimizer = keras.optimizers.SGD(0.1)
                model.compile(optimizer, "mse", run_eagerly=not axes)
            y = np.ones((len(x), *plain.output_shape[1:]), "float32")
            model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False)
            return {v.path: v.numpy() for v in plain.trainable_variables}

        expected = train()
        self.assertAllClose(train(**axes), expected, rtol=1e-5, atol=1e-6)
        names = "\n".join(expected)
        self.assertIn("up/lora_kernel_a", names)
        self.assertIn("down/lora_kernel_b", names)

    @parameterized.parameters("int4", "float8")
    @pytest.mark.crossing(every=2)
    def test_other_modes_are_refused_by_name(self, mode):
        with scope_of("mlp", model=2):
            model = mlp()
        expected = model.predict(X, verbose=0)
        with self.assertRaisesRegex(
            ValueError,
            f"to int8 only.*mode='{mode}', for '.*/up' of type Dense.*plain",
        ):
            quantize(model, mode=mode)
        self.assertAllClose(model.predict(X, verbose=0), expected)

    @parameterized.parameters("gptq", "awq")
    def test_calibrated_modes_are_refused_by_name(self, mode):
        kind = {"gptq": "GPTQConfig", "awq": "AWQConfig"}[mode]
        config = getattr(keras.quantizers, kind)(
            dataset=["text"], tokenizer=lambda text: text
        )
        with scope_of("mlp", model=2):
            model = mlp()
        said = f"int8 only.*mode='{mode}'"
        if not releases.IS_3_15:  # which asks for the structure of the model
            said = f"For mode='{mode}', a valid quantization structure"
        with self.assertRaisesRegex(ValueError, said):
            quantize(model, config)

    def test_what_the_error_says_to_do(self):
        file = os.path.join(self.create_tempdir(), "int4.keras")
        with scope_of("mlp", model=2):
            sharded = mlp()
        keras.utils.clear_session()
        plain = mlp()
        plain.set_weights(sharded.get_weights())
        quantize(plain, mode="int4")
        expected = plain.predict(X, verbose=0)
        plain.save(file)
        with scope_of("mlp", model=2):
            loaded = keras.models.load_model(file)
        self.assertAllEqual(loaded.predict(X, verbose=0), expected)


if __name__ == "__main__":
    tf.test.main()
