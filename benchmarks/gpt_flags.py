"""Flags of the GPT that several benchmarks train."""

from absl import flags

_FLAGS = (
    flags.DEFINE_integer("blocks", 8, "Blocks of the GPT."),
    flags.DEFINE_integer("width", 256, "Features of a token."),
    flags.DEFINE_integer("length", 64, "Tokens in a sequence."),
    flags.DEFINE_integer("batch", 32, "Sequences in a batch."),
)


def sizes():
    """The values of the flags, by name."""
    return {flag.name: flag.value for flag in _FLAGS}
