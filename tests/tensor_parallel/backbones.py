"""Small backbones of keras_hub, of three families."""

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
