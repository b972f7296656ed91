"""Every private name of keras_hub that tfscale relies on, and why.

keras_hub need not be there, and is not imported: its files are read. They are
of attentions that run on shards of their heads; of a model whose file is not
there nothing is expected.
"""

from tfscale._internals.layers import ATTENTION_METHODS
from tfscale._internals.layers import ATTENTIONS
from tfscale._internals.layers import AttentionNames

_MODELS = "keras_hub/src/models/"
_HEADS = "whose heads are sharded"
_SHAPES = "looks at whole shapes"


def _names_of_attention(path: str, names: AttentionNames):
    module, _, _ = path.rpartition(".")
    found = dict.fromkeys(names.projections, _HEADS)
    found |= dict.fromkeys(names.counts, "a rank has a part of them")
    if names.repeats:
        found[names.repeats] = "keys and values are repeated for the queries"
    # Those that count heads mask them in the first of the two.
    methods = ATTENTION_METHODS[: 1 if names.counts else None]
    found |= dict.fromkeys(methods, "a subclass that overrides it has no rule")
    return module.replace(".", "/") + ".py", found


KERAS_HUB = {
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
    **dict(
        _names_of_attention(path, names)
        for path, names in ATTENTIONS.items()
        if path.startswith("keras_hub.")
    ),
}
