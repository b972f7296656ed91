"""Runs a layer by its rule on ranks."""

import inspect

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import layers
from tfscale.adapters.layer import MeshLayer
from tfscale.adapters.layer import adapt_layer
from tfscale.collectives import rank_collectives
from tfscale.context import step_context
from tfscale.tensor_parallel import model_trace
from tfscale.tensor_parallel.rules import attention_rules
from tfscale.tensor_parallel.rules import channel_rules
from tfscale.tensor_parallel.rules import dense_rules
from tfscale.tensor_parallel.rules import embedding_rules
from tfscale.tensor_parallel.rules.rules import Rule
from tfscale.tensor_parallel.sequence_parallel import sequence
from tfscale.variables.of_variable import sharding_of

_FAMILIES = (attention_rules, dense_rules, embedding_rules, channel_rules)


def make_rule(layer) -> Rule | None:
    """The rule of a built layer; None if its weights are gathered."""
    made = (family.make_rule(layer) for family in _FAMILIES)
    return next((rule for rule in made if rule is not None), None)


def layers_with_rules(callers: list) -> list:
    """Of the layers being built, those that a new sharded variable concerns.

    The innermost creates it; the rule of another may cover the layers in it.
    """
    *around, maker = callers
    return [
        *(layer for layer in around if attention_rules.is_attention(layer)),
        maker,
    ]


def scale_dim(layer, name: str, rank: int) -> int | None:
    """The dim of a new scale of int8 that is sharded as its weight, or None."""
    if name == "kernel_scale":
        rule = dense_rules.make_rule(layer)
        if rule is None or rule.source_dim is None:
            return None
        return rank + rule.source_dim
    if name == "embeddings_scale":
        table = layers.weight_of(layer, "embeddings")
        return 0 if sharding_of(table).model_dim == 0 else None
    if name == "reverse_embeddings_scale":
        table = layer.reverse_embeddings
        return 0 if sharding_of(table).model_dim == 1 else None
    return None


def attach(layer, apply_decision) -> None:
    """Lets a layer with sharded variables run by its rule; once.

    `apply_decision` is called with the rule before each call on ranks, and sets
    whether the layer leaves its output sharded.
    """
    if call_of(layer) is None:
        call = ShardedCall(layer, apply_decision)
        adapt_layer(layer, sharded_call=call)


def call_of(layer) -> "ShardedCall | None":
    """The `ShardedCall` of a layer, or None."""
    return layer.sharded_call if isinstance(layer, MeshLayer) else None


class ShardedCall:
    """How a layer with sharded variables runs."""

    def __init__(self, layer, apply_decision):
        self._layer = layer
        self._apply_decision = apply_decision
        self._kind = self._rule = None
        # Whether analysis of a model has seen the layer.
        self.is_decided = False
        # Whether all of its layouts were found, not asked for.
        self.is_found = True
        # Why it gathers its output at once, by the last analysis.
        self.reason = None
        # Where it has been called: in a branch, a loop or a function of a
        # layer, where it runs whole, and where it runs by its rule.
        self.runs_nested = self.runs_by_rule = False

    @property
    def rule(self) -> Rule | None:
        """The rule of the layer, None if its weights are gathered.

        It changes, and has to be decided again, once the layer or one inside it
        has been quantized, or has LoRA or another activation.
        """
        kind = [
            (
                getattr(layer, "quantization_mode", None),
                getattr(layer, "lora_enabled", False),
                getattr(layer, "activation", None),
            )
            for layer in attributes.flatten_layers(self._layer)
        ]
        if kind != self._kind:
            rule = make_rule(self._layer)
            spec = self._layer.input_spec
            if rule is not None and rule.sink_dim is not None and spec:
                # It names the size of the whole input, and refuses a shard.
                # The rank stays: with it Keras quantizes an EinsumDense.
                self._layer.input_spec = keras.layers.InputSpec(
                    ndim=spec.ndim, min_ndim=spec.min_ndim
                )
            self._kind, self._rule = kind, rule
            self.is_decided, self.reason = False, None
            self.runs_nested = self.runs_by_rule = False
        return self._rule

    def run(self, call, /, *args, **kwargs):
        """Calls the layer by its rule on ranks, and unchanged elsewhere."""
        rule = self.rule
        if rule is None:
            return call(*args, **kwargs)
        if step_context.is_in_nested_graph():
            # Its variables are gathered outside, where they are read.
            self.runs_nested = True
            return call(*args, **kwargs)
        recorder = step_context.current().ranks.recorder
        if recorder is None and rank_collectives.num_ranks() == 1:
            return call(*args, **kwargs)
        self.runs_by_rule = True
        if recorder is not None:
            return self._record(recorder, call, args, kwargs)
        self._apply_decision(rule)
        return rule.run(*args, **kwargs)

    def _record(self, recorder, call, args, kwargs):
        """A call with the shapes of a rank; the values do not matter."""
        if recorder.is_inside:
            return call(*args, **kwargs)
        rule, count = self.rule, recorder.num_shards
        divides = rule.divides(args, kwargs)
        scatters = rule.scatters(args, kwargs)
        if not args:
            name, *_ = inspect.signature(call).parameters
            args = (kwargs.pop(name),)
        inputs = args[0]
        start = model_trace.num_operations()
        # An output that does not stay sharded is whole.
        is_sharded = rule.stays_sharded and not rule.propagates
        if count > 1 and rule.sink_dim is not None and rule.is_sharded(inputs):
            is_sharded |= rule.propagates
            dim = inputs.shape.rank + rule.sink_dim
            args = (tf.concat([inputs] * count, axis=dim), *args[1:])
        recorder.is_inside = True
        try:
            outputs = call(*args, **kwargs)
        finally:
            recorder.is_inside = False
        if count > 1 and divides and is_sharded:
            dim = outputs.shape.rank + rule.source_dim
            outputs = tf.split(outputs, count, axis=dim)[0]
        if (
            count > 1
            and scatters
            and sequence.scatters(rule.sum_layer, outputs)
        ):
            outputs = tf.split(outputs, count, axis=1)[0]
        operations = range(start, model_trace.num_operations())
        recorder.calls.append(
            model_trace.RecordedCall(
                rule, operations, inputs, outputs, divides, scatters
            )
        )
        return outputs
