"""Embeddings on shards: each rank has some rows of the table, or some columns.

With the vocabulary split, a rank looks up the tokens whose rows it has and
zeros for the others; the sum over ranks is the embedding. The reverse, logits
of an output projection, is column-parallel in the vocabulary.

Source: Shoeybi et al., Megatron-LM (2019), section 3, on input and output
embedding.
"""

import keras

from tfscale._internals import layers
from tfscale._internals import symbols
from tfscale.collectives import rank_collectives
from tfscale.tensor_parallel.rules import rules
from tfscale.tensor_parallel.sequence_parallel import sequence
from tfscale.variables.of_variable import sharding_of

_REVERSIBLE = keras.layers.ReversibleEmbedding


def make_rule(layer) -> rules.Rule | None:
    """The rule of an Embedding or ReversibleEmbedding with a sharded table."""
    kinds = (keras.layers.Embedding, _REVERSIBLE)
    if not rules.runs_as(layer, kinds, "embeddings", "compute_mask"):
        return None
    if layer.quantization_mode not in (None, "int8"):
        return None
    dim = sharding_of(layers.weight_of(layer, "embeddings")).model_dim
    if dim is None:
        return None
    if layer.__class__.call is _REVERSIBLE.call:
        tied = layer.tie_weights
        if dim == 0 and (
            tied or sharding_of(layer.reverse_embeddings).model_dim == 1
        ):
            return _VocabularyParallel(layer)
        return None
    return _VocabularyParallel(layer) if dim == 0 else _ColumnEmbedding(layer)


class _VocabularyParallel(rules.Rule):
    # For logits only, see `divides`.
    source_dim = -1
    shares_input = True
    # Whether a call has computed logits, as far as known.
    makes_logits = False

    @property
    def collectives(self):
        """See `Rule`: of a lookup, and of logits if any."""
        of_logits = ()
        if self.makes_logits:
            of_logits = super().collectives
        return ("all-reduce of the output", *of_logits)

    def divides(self, args, kwargs):
        """Whether this call's output can be sharded."""
        reverse = kwargs.get("reverse", args[1] if len(args) > 1 else False)
        self.makes_logits |= bool(reverse)
        return bool(reverse)

    def scatters(self, args, kwargs):
        if self.divides(args, kwargs):
            return None
        return self.layer.activity_regularizer is None

    def run(self, inputs, reverse=False):
        layer = self.layer
        if reverse:
            self.makes_logits = True
            inputs = sequence.copy_to_region(inputs)
            logits = rules.call(self._on_shards(reverse), inputs, reverse)
            return self.gather_output(logits)
        if inputs.dtype not in ("int32", "int64"):
            inputs = keras.ops.cast(inputs, "int32")
        rows = layer.input_dim // rank_collectives.num_ranks()
        # Keras counts negative tokens from the end of the table.
        local = keras.ops.where(inputs < 0, inputs + layer.input_dim, inputs)
        local -= rows * rank_collectives.rank()
        here = keras.ops.logical_and(local >= 0, local < rows)
        tokens = keras.ops.where(here, local, 0)
        outputs = rules.call(self._on_shards(reverse), tokens)
        outputs = keras.ops.where(keras.ops.expand_dims(here, -1), outputs, 0.0)
        outputs = sequence.sum_over_ranks(layer, outputs)
        # A float one sets it in `call`, in the place of its `compute_mask`.
        if isinstance(layer, _REVERSIBLE) and layer.quantization_mode is None:
            mask = keras.layers.Embedding.compute_mask(layer, inputs)
            if mask is not None:
                symbols.set_keras_mask(outputs, mask)
        return outputs

    def _on_shards(self, reverse):
        layer, dims = self.layer, {}
        if reverse and not layer.tie_weights:
            dims["reverse_embeddings"] = 1
        if layer.quantization_mode is not None:
            names = ("embeddings", *dims)
            dims |= {f"{name}_scale": 0 for name in names}
        changed = {
            name: rules.local_shard_along(getattr(layer, name), dim)
            for name, dim in dims.items()
        }
        return rules.on_shards(layer, "embeddings", **changed)


class _ColumnEmbedding(rules.Rule):
    source_dim = -1

    @property
    def collectives(self):
        """See `Rule`: tokens have no gradient."""
        return () if self.stays_sharded else ("all-gather of the output",)

    def run(self, inputs):
        copy = rules.on_shards(self.layer, "embeddings")
        return self.gather_output(rules.call(copy, inputs))
