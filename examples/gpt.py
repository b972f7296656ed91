"""A byte-level GPT out of ordinary Keras layers, and a sampler for it."""

import keras
import numpy as np

from tfscale import data

VOCABULARY = 256  # a token is a byte


def build_gpt(
    num_blocks, width, num_heads, sequence_length, dropout, packed=False
):
    """A decoder-only transformer with pre-norm blocks and learned positions.

    Args:
        num_blocks: Integer.
        width: Integer, a multiple of `num_heads`.
        num_heads: Integer.
        sequence_length: Integer, the number of tokens it reads.
        dropout: Float, the rate after each attention and each MLP.
        packed: Whether a row holds several documents, as of `data.pack`, none
            of which may see another.

    Returns:
        A functional `keras.Model` from int32 tokens of shape
        `(batch, sequence_length)` to float32 logits of shape
        `(batch, sequence_length, VOCABULARY)`. If packed, it takes a dict of
        `"tokens"`, `"segment_ids"` and `"positions"`, all of them like tokens.
    """
    tokens = keras.Input((sequence_length,), dtype="int32", name="tokens")
    if packed:
        segment_ids = keras.Input(
            (sequence_length,), dtype="int32", name="segment_ids"
        )
        positions = keras.Input(
            (sequence_length,), dtype="int32", name="positions"
        )
        inputs = {
            "tokens": tokens,
            "segment_ids": segment_ids,
            "positions": positions,
        }
    else:
        # 0, 1, 2, ... in every row, out of operations that a saved model keeps.
        ones = keras.ops.ones_like(tokens)
        positions = keras.ops.cumsum(ones, axis=-1) - 1
        segment_ids, inputs = None, tokens
    x = keras.layers.Add(name="embedding")(
        [
            keras.layers.Embedding(VOCABULARY, width, name="tokens_embedding")(
                tokens
            ),
            keras.layers.Embedding(
                sequence_length, width, name="positions_embedding"
            )(positions),
        ]
    )
    for index in range(num_blocks):
        x = _block(
            x, segment_ids, width, num_heads, dropout, name=f"block_{index}"
        )
    x = keras.layers.LayerNormalization(name="final_norm")(x)
    logits = keras.layers.Dense(VOCABULARY, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="gpt")


def as_one_document(tokens):
    """What a packed model takes, of rows that hold one document each.

    Args:
        tokens: Integer array of shape `(batch, sequence_length)`.

    Returns:
        A dict of arrays of that shape.
    """
    return {
        "tokens": tokens,
        "segment_ids": np.ones_like(tokens),
        "positions": np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape),
    }


def _block(x, segment_ids, width, num_heads, dropout, name):
    # Of each block anew: between the stages of a pipeline the numbers travel,
    # not a square of them.
    mask = (
        None if segment_ids is None else data.packed_attention_mask(segment_ids)
    )
    y = keras.layers.LayerNormalization(name=f"{name}_attention_norm")(x)
    y = keras.layers.MultiHeadAttention(
        num_heads, width // num_heads, name=f"{name}_attention"
    )(y, y, attention_mask=mask, use_causal_mask=True)
    y = keras.layers.Dropout(dropout, name=f"{name}_attention_dropout")(y)
    x = keras.layers.Add(name=f"{name}_attention_add")([x, y])
    y = keras.layers.LayerNormalization(name=f"{name}_mlp_norm")(x)
    y = keras.layers.Dense(4 * width, activation="gelu", name=f"{name}_mlp_up")(
        y
    )
    y = keras.layers.Dense(width, name=f"{name}_mlp_down")(y)
    y = keras.layers.Dropout(dropout, name=f"{name}_mlp_dropout")(y)
    return keras.layers.Add(name=f"{name}_mlp_add")([x, y])


def sample(model, prompt, num_tokens, temperature, seed):
    """Continues a text, one byte at a time.

    Args:
        model: What `build_gpt` returned, or the same loaded from a file.
        prompt: String.
        num_tokens: Integer, how many bytes to add.
        temperature: Float, above 0; lower is more cautious.
        seed: Integer; the same seed gives the same text.

    Returns:
        The prompt and its continuation as a string; bytes that are no UTF-8
        come as U+FFFD.
    """
    packed = isinstance(model.input, dict)
    length = model.output_shape[1]
    random = np.random.default_rng(seed)
    text = list(prompt.encode())
    for _ in range(num_tokens):
        window = text[-length:]
        # Attention is causal: what fills the row up is never looked at.
        row = np.zeros((1, length), "int32")
        row[0, : len(window)] = window
        logits = model.predict_on_batch(as_one_document(row) if packed else row)
        logits = logits[0, len(window) - 1] / temperature
        probabilities = np.exp(logits - logits.max(), dtype="float64")
        probabilities /= probabilities.sum()
        text.append(int(random.choice(VOCABULARY, p=probabilities)))
    return bytes(text).decode(errors="replace")
