"""Small backbones of keras_hub, of five families."""

import keras
import keras_hub

_SIZES = dict(vocabulary_size=24, hidden_dim=16, intermediate_dim=32)
_GROUPED_HEADS = dict(num_query_heads=4, num_key_value_heads=2)


def llama(num_layers=1):
    return keras_hub.models.LlamaBackbone(
        **_SIZES,
        num_layers=num_layers,
        **_GROUPED_HEADS,
        tie_word_embeddings=True,
        name="backbone",
    )


def gpt2(num_layers=1, length=6):
    return keras_hub.models.GPT2Backbone(
        **_SIZES,
        num_layers=num_layers,
        num_heads=4,
        dropout=0.0,
        max_sequence_length=length,
        name="backbone",
    )


def gemma3(num_layers=1):
    """Its attention has weights that all heads have in common."""
    return keras_hub.models.Gemma3Backbone(
        **_SIZES,
        image_size=16,
        num_layers=num_layers,
        **_GROUPED_HEADS,
        head_dim=4,
        use_query_key_norm=True,
        name="backbone",
    )


def bert():
    """Its activation is a function of its own."""
    backbone = keras_hub.models.BertBackbone(
        **_SIZES,
        num_layers=1,
        num_heads=4,
        dropout=0.0,
        max_sequence_length=6,
    )
    tokens, padding = (
        backbone.input[name] for name in ("token_ids", "padding_mask")
    )
    inputs = dict(backbone.input, segment_ids=keras.ops.zeros_like(tokens))
    outputs = backbone(inputs)
    pooled = keras.ops.expand_dims(outputs["pooled_output"], 1)
    return keras.Model(
        dict(token_ids=tokens, padding_mask=padding),
        outputs["sequence_output"] + pooled,
    )


def mixtral():
    """Most of its weights are those of experts."""
    backbone = keras_hub.models.MixtralBackbone(
        **_SIZES,
        num_layers=1,
        **_GROUPED_HEADS,
        num_experts=4,
        top_k=2,
    )
    # The weights of logits, of which there are none here, have no gradient.
    table = backbone.token_embedding
    logits = table(backbone.output, reverse=True)
    return keras.Model(backbone.input, logits[..., :16])
