"""Small backbones of keras_hub, of five families."""

import keras
import keras_hub


def llama(num_layers=1):
    return keras_hub.models.LlamaBackbone(
        vocabulary_size=24,
        num_layers=num_layers,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        tie_word_embeddings=True,
        name="backbone",
    )


def gpt2(num_layers=1, length=6):
    return keras_hub.models.GPT2Backbone(
        vocabulary_size=24,
        num_layers=num_layers,
        num_heads=4,
        hidden_dim=16,
        intermediate_dim=32,
        dropout=0.0,
        max_sequence_length=length,
        name="backbone",
    )


def gemma3(num_layers=1):
    """Its attention has weights that all heads have in common."""
    return keras_hub.models.Gemma3Backbone(
        vocabulary_size=24,
        image_size=16,
        num_layers=num_layers,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        head_dim=4,
        use_query_key_norm=True,
        name="backbone",
    )


def bert():
    """Its activation is a function of its own."""
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=24,
        num_layers=1,
        num_heads=4,
        hidden_dim=16,
        intermediate_dim=32,
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
        vocabulary_size=24,
        num_layers=1,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        num_experts=4,
        top_k=2,
    )
    # The weights of logits, of which there are none here, have no gradient.
    table = backbone.token_embedding
    logits = table(backbone.output, reverse=True)
    return keras.Model(backbone.input, logits[..., :16])
