"""Every private name of keras_hub that tfscale relies on, and why.

keras_hub need not be there, and is not imported: its files are read. They are
of attentions that run on shards of their heads; of a model whose file is not
there nothing is expected.
"""

_MODELS = "keras_hub/src/models/"
_CALL = "a subclass that overrides it has no rule"
_HEADS = "whose heads are sharded"
_OUTPUT = "which adds up over heads"

_WITH_UNDERSCORES = {
    "_compute_attention": _CALL,
    "_masked_softmax": _CALL,
    "_query_dense": _HEADS,
    "_key_dense": _HEADS,
    "_value_dense": _HEADS,
    "_output_dense": _OUTPUT,
}
_GEMMA = {
    "_compute_attention": _CALL,
    "query_dense": _HEADS,
    "key_dense": _HEADS,
    "value_dense": _HEADS,
    "output_dense": _OUTPUT,
    "num_query_heads": "a rank has a part of them",
    "num_key_value_heads": "likewise",
    "hidden_dim": "likewise",
}
_REPEATS = "how often keys and values are repeated for the queries"

_SHAPES = "looks at whole shapes"

KERAS_HUB = {
    f"{_MODELS}llama/llama_attention.py": {
        **_WITH_UNDERSCORES,
        "num_key_value_groups": _REPEATS,
    },
    f"{_MODELS}mistral/mistral_attention.py": {
        **_WITH_UNDERSCORES,
        "_num_key_value_groups": _REPEATS,
    },
    f"{_MODELS}qwen/qwen_attention.py": {
        **_WITH_UNDERSCORES,
        "num_key_value_groups": _REPEATS,
    },
    f"{_MODELS}llama/llama_decoder.py": {
        "_compute_self_attention_mask": _SHAPES,
    },
    f"{_MODELS}mistral/mistral_transformer_decoder.py": {
        "_compute_self_attention_mask": _SHAPES,
    },
    "keras_hub/src/layers/modeling/transformer_decoder.py": {
        "_compute_self_attention_mask": _SHAPES,
    },
    f"{_MODELS}qwen/qwen_decoder.py": {
        "_compute_self_attention_mask": _SHAPES,
    },
    f"{_MODELS}gemma/gemma_decoder_block.py": {
        "_compute_attention_mask": _SHAPES,
    },
    f"{_MODELS}gemma3/gemma3_decoder_block.py": {
        "_compute_attention_mask": _SHAPES,
    },
    f"{_MODELS}gemma/gemma_attention.py": _GEMMA,
    f"{_MODELS}gemma3/gemma3_attention.py": _GEMMA,
}
