"""Families of keras_hub, as small as they can be, train a step as pipelines.

What they have in common is that each was written for one device by somebody
else: nested models, tied embeddings, masks, several inputs and outputs, a
None where a layer promised a tensor. Loss and gradients have to be those of one
device, to rounding.
"""

import inspect
import warnings

import keras
import keras_hub
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tfscale import _internals

# By the names that constructors of keras_hub have for sizes.
SIZES = dict(
    attention_dropout=0.0,
    dropout=0.0,
    embedding_dim=4,
    head_dim=4,
    head_size=4,
    hidden_dim=8,
    hidden_size=8,
    image_shape=(8, 8, 3),
    image_size=8,
    intermediate_dim=8,
    max_sequence_length=4,
    mlp_dim=8,
    moe_intermediate_dim=8,
    num_attention_heads=2,
    num_experts=3,
    num_heads=2,
    num_key_value_heads=2,
    num_layers=1,
    num_query_heads=2,
    patch_size=4,
    shared_expert_intermediate_dim=8,
    top_k=2,
    vocab_size=9,
    vocabulary_size=9,
)
# Others, of one family alone.
FAMILIES = dict(
    Albert={},
    Bart={},
    Bert={},
    Bloom={},
    DebertaV3=dict(bucket_size=2),
    DeiT={},
    DenseNet=dict(
        stackwise_num_repeats=[1], growth_rate=2, image_shape=(16, 16, 3)
    ),
    DistilBert={},
    ESM={},
    Electra={},
    FNet={},
    Falcon={},
    GPT2={},
    GPTNeoX=dict(rotary_percentage=0.5),
    Gemma={},
    Gemma3={},
    GptOss={},
    Llama={},
    MiT=dict(
        layerwise_depths=[1],
        layerwise_num_heads=[1],
        layerwise_sr_ratios=[2],
        max_drop_path_rate=0.0,
        layerwise_patch_sizes=[3],
        layerwise_strides=[2],
        hidden_dims=[4],
    ),
    Mistral={},
    Mixtral={},
    OPT={},
    Phi3={},
    Qwen={},
    Qwen3={},
    Qwen3Moe={},
    QwenMoe={},
    ResNet=dict(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64],
        stackwise_num_blocks=[1],
        stackwise_num_strides=[1],
        block_type="basic_block",
    ),
    Roberta={},
    RoformerV2={},
    SwinTransformer=dict(
        embed_dim=4,
        depths=[1],
        num_heads=[1],
        window_size=2,
        drop_path=0.0,
        dropout_rate=0.0,
    ),
    T5={},
    VGG=dict(stackwise_num_repeats=[1, 1], stackwise_num_filters=[4, 4]),
    ViT={},
    Whisper=dict(
        num_mels=3, max_encoder_sequence_length=4, max_decoder_sequence_length=4
    ),
    XLNet={},
)
# Microbatches are others than the whole, by nature: compared with one of them.
ACROSS_ROWS = dict(
    DenseNet="BatchNormalization",
    Mixtral="a product of means over tokens is added to the loss",
    Qwen3Moe="likewise",
    QwenMoe="likewise",
    ResNet="BatchNormalization",
)
RATE = 1.0


def build(family):
    kind = getattr(keras_hub.models, f"{family}Backbone")
    wanted = inspect.signature(kind.__init__).parameters
    sizes = {name: size for name, size in SIZES.items() if name in wanted}
    model = kind(**{**sizes, **FAMILIES[family]})
    for layer in _internals.flatten_layers(model):
        if isinstance(layer, keras.layers.Dropout):  # of MiT, with no argument
            layer.rate = 0.0
    return model


def batch(model):
    """Four rows for a model."""
    random = np.random.RandomState(0)

    def rows(name, tensor):
        shape = [4, *(4 if size is None else size for size in tensor.shape[1:])]
        if "mask" in name:
            return np.ones(shape, "int32")
        if "int" in str(tensor.dtype):
            return random.randint(1, 2 if "segment" in name else 9, shape)
        return random.normal(size=shape).astype("float32")

    if isinstance(model.input, dict):
        return {name: rows(name, x) for name, x in model.input.items()}
    return rows("", model.input)


def step_on_one_device(model, x):
    """Targets, the loss, and the gradients of all weights."""
    random = np.random.RandomState(1)
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        y = keras.tree.map_structure(
            lambda output: random.normal(size=output.shape).astype("float32"),
            outputs,
        )
        loss = sum(model.losses) + sum(
            keras.ops.mean(keras.ops.square(output - wanted))
            for output, wanted in zip(
                keras.tree.flatten(outputs), keras.tree.flatten(y), strict=True
            )
        )
    variables = [variable.value for variable in model.trainable_variables]
    return (
        y,
        loss,
        [
            np.zeros(v.shape) if g is None else tf.convert_to_tensor(g).numpy()
            for v, g in zip(variables, tape.gradient(loss, variables))
        ],
    )


class KerasHubTest(parameterized.TestCase):
    @parameterized.parameters(*FAMILIES)
    def test_one_step(self, family):
        with warnings.catch_warnings():
            # T5 gives masks to a layer of its own that does not know them.
            warnings.filterwarnings("ignore", "(?s).*not support masking")
            # A head that is not tied has no part in the backbone.
            warnings.filterwarnings("ignore", "Gradients do not exist")
            self._test_one_step(family)

    def _test_one_step(self, family):
        same_numbers.reset()
        alone = build(family)
        x = batch(alone)
        old = [np.array(v) for v in alone.trainable_variables]
        y, loss, gradients = step_on_one_device(alone, x)
        same_numbers.reset()
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
        with strategy.scope():
            backbone = build(family)
            model = tfscale.PipelineModel(
                backbone, 1 if family in ACROSS_ROWS else 2, balance="params"
            )
            model.compile(
                keras.optimizers.SGD(RATE),
                keras.tree.map_structure(lambda _: "mse", backbone.output),
            )
            # Less to trace than what Keras builds it all with.
            model.compute_loss(y=y, y_pred=y)
            model.optimizer.build(model.trainable_variables)
        found = model.train_on_batch(x, y, return_dict=True)["loss"]
        np.testing.assert_allclose(found, loss, rtol=1e-5)
        largest = max(np.abs(gradient).max() for gradient in gradients)
        self.assertGreater(largest, 1e-3)
        for variable, value, gradient in zip(
            backbone.trainable_variables, old, gradients, strict=True
        ):
            np.testing.assert_allclose(
                (value - np.array(variable)) / RATE,
                gradient,
                rtol=0,
                atol=1e-5 * max(largest, np.abs(value).max()),
                err_msg=variable.path,
            )
