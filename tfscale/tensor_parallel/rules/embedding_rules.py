"""Embeddings on shards: each rank has some rows of the table, or some columns.

With the vocabulary split, a rank looks up the tokens whose rows it has and
zeros for the others; the sum over ranks is the embedding. The reverse, logits
of an output projection, is column-parallel in the vocabulary.

Source: Shoeybi et al., Megatron-LM (2019), section 3, on input and output
embedding.
"""

import keras
import tensorflow as tf

from tfscale._internals import layers
from tfscale._internals import symbols
from tfscale.tensor_parallel import collectives
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
        if reverse:
            self.makes_logits = True
            return self._logits(inputs)
        layer = self.layer
        if inputs.dtype not in ("int32", "int64"):
            inputs = keras.ops.cast(inputs, "int32")
        rows = layer.input_dim // collectives.num_ranks()
        local = inputs - rows * collectives.rank()
        here = keras.ops.logical_and(local >= 0, local < rows)
        outputs = self._look_up(keras.ops.where(here, local, 0))
        outputs = keras.ops.where(keras.ops.expand_dims(here, -1), outputs, 0.0)
        outputs = sequence.sum_over_ranks(
            layer, keras.ops.cast(outputs, layer.compute_dtype)
        )
        mask = layer.compute_mask(inputs)
        if (
            mask is not None
            and isinstance(layer, _REVERSIBLE)
            and layer.quantization_mode is None  # as Keras has it
        ):
            symbols.set_keras_mask(outputs, mask)
        return outputs

    def _look_up(self, tokens):
        layer = self.layer
        if layer.quantization_mode is None:
            table = rules.weight_shard(layer, "embeddings")
            return keras.ops.take(table, tokens, axis=0)
        return self._call_int8(tokens)

    def _call_int8(self, *args, **others):
        layer = self.layer
        table = rules.shard_of(layers.weight_of(layer, "embeddings"))
        scale = rules.local_shard_along(layer.embeddings_scale, 0)
        return rules.call_int8(
            layer, "embeddings", table, scale, *args, **others
        )

    def _logits(self, inputs):
        layer = self.layer
        if layer.quantization_mode is not None:
            others = {}
            if not layer.tie_weights:
                others = dict(
                    reverse_embeddings=rules.shard_of(layer.reverse_embeddings),
                    reverse_embeddings_scale=rules.local_shard_along(
                        layer.reverse_embeddings_scale, 0
                    ),
                )
            inputs = sequence.copy_to_region(inputs)
            return self.gather_output(self._call_int8(inputs, True, **others))
        if layer.tie_weights:
            table = rules.weight_shard(layer, "embeddings")
            kernel = keras.ops.transpose(table)
        else:
            kernel = rules.shard_of(layer.reverse_embeddings)
        inputs = sequence.copy_to_region(inputs)
        if layer.reverse_dtype is not None:
            inputs = keras.ops.cast(inputs, layer.reverse_dtype)
            kernel = keras.ops.cast(kernel, layer.reverse_dtype)
        logits = keras.ops.matmul(inputs, kernel)
        cap = layer.logit_soft_cap
        if cap is not None:
            logits = keras.ops.multiply(
                keras.ops.tanh(keras.ops.divide(logits, cap)), cap
            )
        return self.gather_output(logits)


class _ColumnEmbedding(rules.Rule):
    source_dim = -1

    @property
    def collectives(self):
        """See `Rule`: tokens have no gradient."""
        return () if self.stays_sharded else ("all-gather of the output",)

    def run(self, inputs):
        if inputs.dtype not in ("int32", "int64"):
            inputs = keras.ops.cast(inputs, "int32")
        layer = self.layer
        if layer.quantization_mode is None:
            table = rules.weight_shard(layer, "embeddings")
            outputs = keras.ops.take(table, inputs, axis=0)
        else:
            scale = tf.convert_to_tensor(layer.embeddings_scale)
            table = rules.shard_of(layers.weight_of(layer, "embeddings"))
            outputs = rules.call_int8(layer, "embeddings", table, scale, inputs)
        return self.gather_output(keras.ops.cast(outputs, layer.compute_dtype))
