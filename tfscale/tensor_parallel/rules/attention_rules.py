"""Attention on shards of its heads, for layers that analysis cannot follow.

Queries and the output projection are sharded over the ranks by heads. Of
grouped-query attention with fewer key/value heads than ranks, the kernels of
keys and values are whole on all ranks, and each rank computes the heads that
its own query heads need, each as often as these share it:

    query heads      0 1 | 2 3 | 4 5 | 6 7      4 ranks
    key/value heads   0  |  0  |  1  |  1       2 heads

Source: Ainslie et al., GQA: Training Generalized Multi-Query Transformer
Models from Multi-Head Checkpoints (2023), section 2.2, on sharding.
"""

import functools
import inspect

import keras
import tensorflow as tf

from tfscale._internals import instances
from tfscale._internals import layers
from tfscale.collectives import rank_collectives
from tfscale.context import step_context
from tfscale.tensor_parallel import rank_seeds
from tfscale.tensor_parallel.rules import dense_rules
from tfscale.tensor_parallel.rules import rules
from tfscale.tensor_parallel.sequence_parallel import sequence
from tfscale.variables.of_variable import sharding_of

_HEADS = -2
_dense = layers.attention_dense


def is_attention(layer) -> bool:
    """Whether a layer is an attention with a rule.

    Its `call` projects queries, keys and values, may repeat keys and values
    along dim 2, and ends with the output projection.
    """
    kind = layers.attention_class(layer)
    if kind is keras.layers.MultiHeadAttention and not hasattr(
        layer, "model_parallel_dims"
    ):
        # The layer of Keras is analyzed operation by operation.
        return False
    if kind is None:
        return False
    return rules.runs_as(layer, [kind], *layers.private_methods(kind))


def make_rule(layer) -> rules.Rule | None:
    """The rule of an attention whose heads are sharded."""
    if not is_attention(layer):
        return None
    row = dense_rules.make_rule(_dense(layer, "attention_output"))
    if row is None or row.sink_dim != _HEADS:
        return None
    queries = [_dense(layer, "query")]
    gate = _dense(layer, "gate")
    if gate is not None:
        queries.append(gate)
    keys = [_dense(layer, "key"), _dense(layer, "value")]
    if not all(_gives_heads(dense) for dense in queries):
        return None
    if all(_gives_heads(dense) for dense in keys):
        return _Attention(layer, queries + keys)
    if all(_is_whole(dense) for dense in keys):
        return _GroupedAttention(layer, queries)
    return None


def _gives_heads(dense):
    rule = dense_rules.make_rule(dense)
    return (
        rule is not None and rule.source_dim == _HEADS and rule.divides((), {})
    )


def _is_whole(dense):
    return (
        all(sharding_of(v).model_dim is None for v in dense.weights)
        and dense.activity_regularizer is None
        and not dense.lora_enabled
        and dense.quantization_mode in (None, "int8")
    )


class _Attention(rules.Rule):
    shares_input = True
    collectives: tuple[str, ...] = ()  # beside those of the projections

    def __init__(self, layer, columns):
        super().__init__(layer)
        self._row = dense_rules.make_rule(_dense(layer, "attention_output"))
        self._columns = columns
        for dense in columns:
            rule = dense.sharded_call.rule
            rule.stays_sharded = rule.is_inner = True
        # Of dropped-out scores, whose heads are sharded.
        for generator in rank_seeds.generators(layer):
            rank_seeds.attach(generator)

    @property
    def sum_layer(self):
        return _dense(self.layer, "attention_output")

    def scatters(self, args, kwargs):
        layer = self.layer
        return (
            kwargs.get("cache") is None
            and not kwargs.get("return_attention_scores")
            and layer.activity_regularizer is None
            and self._row.scatters((), {})
        )

    def run(self, *args, **kwargs):
        layer = self.layer
        if kwargs.get("cache") is not None:
            # The cache has all heads.
            changed = {
                name: dense_rules.make_rule(dense).run
                for name, dense in instances.attributes_of(layer).items()
                if any(dense is column for column in self._columns)
            }
            return _call(layer, changed, args, kwargs)
        args, kwargs = self._with_layer_mask(args, kwargs)
        with step_context.within_ranks(seeds_are_for_shards=True):
            outputs = _call(layer, self.local_heads(), args, kwargs)
        if not isinstance(outputs, tuple):
            return outputs
        outputs, scores = outputs
        dim = scores.shape.rank - self._num_positions() - 1
        return outputs, rank_collectives.gather_from_ranks(scores, dim)

    def _num_positions(self):
        """How many dims of scores come after batch and heads."""
        return 2 * layers.num_attention_axes(self.layer)

    def _with_layer_mask(self, args, kwargs):
        call = self.layer.__class__.call
        given = inspect.signature(call).bind(self.layer, *args, **kwargs)
        mask = given.arguments.get("attention_mask")
        if mask is not None and len(mask.shape) == self._num_positions() + 2:
            query = _dense(self.layer, "query")
            if mask.shape[1] == query.kernel.shape[_heads_dim(query)] > 1:
                mask = rank_collectives.local_shard(mask, 1)
                given.arguments["attention_mask"] = mask
        return given.args[1:], given.kwargs

    def local_heads(self):
        """Attributes of the layer that differ for a share of the heads."""
        layer, changed = self.layer, {}
        for name in layers.attention_names(layer).counts:
            changed[name] = getattr(layer, name) // rank_collectives.num_ranks()
        # Weights that all heads share.
        for name in ("query_norm", "key_norm"):
            if hasattr(layer, name):
                norm = getattr(layer, name)
                changed[name] = functools.partial(_call_on_shards, norm)
        return changed


class _GroupedAttention(_Attention):
    """Every rank has its share of the query heads, and all others."""

    collectives = (
        "all-reduce of the keys' and values' input gradient",
        "all-reduce of the keys' and values' weight gradients",
    )

    def local_heads(self):
        layer, changed = self.layer, super().local_heads()
        keys = _dense(layer, "key"), _dense(layer, "value")
        for name, dense in instances.attributes_of(layer).items():
            if any(dense is key for key in keys):
                changed[name] = functools.partial(self._project, dense)
        repeats = layers.attention_names(layer).repeats
        if repeats is not None:
            changed[repeats] = 1
        if "num_key_value_heads" in changed:
            changed["num_key_value_heads"] = changed["num_query_heads"]
        return changed

    def _project(self, dense, inputs):
        """A key or value for each of this rank's query heads."""
        first, count, heads = self._heads()

        def needed(variable, dim):
            # The tensor is the same on all ranks; each uses other heads of it.
            whole = rank_collectives.copy_to_ranks(
                tf.convert_to_tensor(variable)
            )
            window = slice(first, first + count)
            return whole[(slice(None),) * dim + (window,)]

        inputs = sequence.copy_to_region(inputs)
        kernel = needed(layers.weight_of(dense), _heads_dim(dense))
        changed = {}
        if dense.quantization_mode is not None:
            scale = dense.kernel_scale
            changed["kernel_scale"] = needed(scale, len(scale.shape) + _HEADS)
        if dense.bias is not None:
            changed["bias"] = needed(dense.bias, 0)
        copy = layers.with_weight(dense, "kernel", kernel, **changed)
        x = rules.call(copy, inputs)
        return tf.gather(x, [head - first for head in heads], axis=2)

    def _heads(self):
        """The first key/value head, how many, and that of each query head.

        All ranks have equally many, even if some do not need the last one:
        gradients of other shapes would need other collectives.
        """
        layer, ranks = self.layer, rank_collectives.num_ranks()
        total, num_keys = (
            dense.kernel.shape[_heads_dim(dense)]
            for dense in (_dense(layer, "query"), _dense(layer, "key"))
        )
        of_queries = [head // (total // num_keys) for head in range(total)]
        size = total // ranks
        needed = [of_queries[i : i + size] for i in range(0, total, size)]
        count = max(heads[-1] - heads[0] + 1 for heads in needed)
        heads = needed[rank_collectives.rank()]
        return min(heads[0], num_keys - count), count, heads


def _heads_dim(dense):
    _, kernel, output = dense_rules.subscripts(dense)
    return kernel.index(output[_HEADS])


def _call_on_shards(layer, x):
    # Here the sequence is whole, and the heads are sharded.
    with step_context.within_ranks(
        sequence_plan=None, gradients_are_partial=True
    ):
        return layer(x)


def _call(layer, changed, args, kwargs):
    # A copy, because ranks share the layer.
    copy = instances.altered(layer, **changed)
    return layer.__class__.call(copy, *args, **kwargs)
