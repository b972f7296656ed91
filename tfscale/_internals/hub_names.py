"""Every private name of keras_hub that tfscale relies on, and why.

keras_hub need not be there, and is not imported: its files are read. They are
of attentions that run on shards of their heads; of a model whose file is not
there nothing is expected.
"""

from collections.abc import Iterator

from tfscale._internals.layers import ATTENTION_METHODS
from tfscale._internals.layers import ATTENTIONS

_MASKED = {
    "layers/modeling/transformer_decoder.py": "_compute_self_attention_mask",
    "models/gemma/gemma_decoder_block.py": "_compute_attention_mask",
    "models/gemma3/gemma3_decoder_block.py": "_compute_attention_mask",
    "models/llama/llama_decoder.py": "_compute_self_attention_mask",
    "models/mistral/mistral_transformer_decoder.py": (
        "_compute_self_attention_mask"
    ),
    "models/qwen/qwen_decoder.py": "_compute_self_attention_mask",
}


def rows() -> Iterator[tuple[str, str, str]]:
    """The path of a file, a name in it, and why."""
    for path, name in _MASKED.items():
        yield f"keras_hub/src/{path}", name, "looks at whole shapes"
    for kind, names in ATTENTIONS.items():
        if not kind.startswith("keras_hub."):
            continue
        path = kind.rpartition(".")[0].replace(".", "/") + ".py"
        for name in names.projections:
            yield path, name, "whose heads are sharded"
        for name in names.counts:
            yield path, name, "a rank has a part of them"
        if names.repeats:
            yield path, names.repeats, "keys and values are repeated"
        # Those that count heads mask them in the first of the two.
        for name in ATTENTION_METHODS[: 1 if names.counts else None]:
            yield path, name, "a subclass that overrides it has no rule"
