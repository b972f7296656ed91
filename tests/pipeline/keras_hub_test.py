"""Families of keras_hub, as small as they can be, train a step as pipelines.

What they have in common is that each was written for one device by somebody
else: nested models, tied embeddings, masks, several inputs and outputs, heads
that compile themselves. The loss of a step has to be that of one device.
"""

import inspect
import warnings

import keras
import keras_hub
import numpy as np
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
    num_attention_heads=2,
    num_heads=2,
    num_key_value_heads=2,
    num_layers=1,
    num_query_heads=2,
    patch_size=4,
    vocabulary_size=9,
)
# Others, of one family alone.
FAMILIES = dict(
    Albert={},
    Bart={},
    Bert={},
    FNet={},
    Falcon={},
    GPT2={},
    GPTNeoX=dict(rotary_percentage=0.5),
    Gemma={},
    Gemma3={},
    Llama={},
    MiT=dict(
        layerwise_depths=[1, 1],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[2, 1],
        max_drop_path_rate=0.0,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
        hidden_dims=[4, 8],
        image_shape=(16, 16, 3),
    ),
    Mistral={},
    OPT={},
    Phi3={},
    Qwen={},
    Qwen3={},
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
    VGG=dict(stackwise_num_repeats=[1, 1], stackwise_num_filters=[4, 4]),
    ViT={},
)


def build(family):
    kind = getattr(keras_hub.models, f"{family}Backbone")
    wanted = inspect.signature(kind.__init__).parameters
    sizes = {name: size for name, size in SIZES.items() if name in wanted}
    return kind(**{**sizes, **FAMILIES[family]})


def batch(model):
    """Four rows for a model: of positions, the first are not padding."""
    random = np.random.RandomState(0)

    def rows(name, tensor):
        shape = [4, *(4 if size is None else size for size in tensor.shape[1:])]
        if "mask" in name:
            return np.ones(shape, "int32")
        if "int" in tensor.dtype:
            return random.randint(1, 2 if "segment" in name else 9, shape)
        return random.normal(size=shape).astype("float32")

    if isinstance(model.input, dict):
        return {name: rows(name, x) for name, x in model.input.items()}
    return rows("", model.input)


def has_batch_norm(model):
    return any(
        isinstance(layer, keras.layers.BatchNormalization)
        for layer in _internals.flatten_layers(model)
    )


class KerasHubTest(parameterized.TestCase):
    @parameterized.parameters(*FAMILIES)
    def test_one_step(self, family):
        same_numbers.reset()
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
        with strategy.scope():
            backbone = build(family)
            model = tfscale.PipelineModel(backbone, 2, balance="params")
            model.compile(
                "sgd",
                keras.tree.map_structure(lambda _: "mse", backbone.output),
            )
        x = batch(backbone)
        before = backbone.get_weights()
        outputs = backbone(x, training=True)
        y = keras.tree.map_structure(
            lambda output: np.ones(output.shape, "float32"), outputs
        )
        expected = sum(
            np.mean(np.square(output - 1.0))
            for output in keras.tree.flatten(outputs)
        )
        with warnings.catch_warnings():
            # A head that is not tied has no part in the backbone.
            warnings.filterwarnings("ignore", "Gradients do not exist")
            loss = model.train_on_batch(x, y, return_dict=True)["loss"]
        if not has_batch_norm(backbone):
            np.testing.assert_allclose(loss, expected, rtol=1e-4)
        changed = [
            not np.array_equal(a, b)
            for a, b in zip(before, backbone.get_weights(), strict=True)
        ]
        self.assertTrue(any(changed))
