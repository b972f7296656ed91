"""How unmodified Keras layers run on shards of their variables.

The layout of its variables decides by which rule a layer runs:

    layout               rule                     input       output
    output dim split     column-parallel          whole (f)   sharded, or whole
    input dim split      row-parallel             sharded     whole (g)
    vocabulary split     vocabulary-parallel      whole       whole (g)
    channels split       each channel by itself   sharded     sharded
    anything else        none: weights are        whole       whole
                         gathered where used

analysis.py finds whether a sharded output may stay sharded; by default it is
gathered at once. A layer of `tfscale.layers` decides itself, by `gather_output`
of a column-parallel and `input_is_parallel` of a row-parallel one. Layers that
are not of Keras, and subclasses that override a method of `call`, have no rule.
"""

import abc

import tensorflow as tf

from tfscale._internals import instances
from tfscale._internals import layers
from tfscale.collectives import rank_collectives
from tfscale.context import step_context
from tfscale.tensor_parallel.elementwise import acts_on_elements
from tfscale.variables.of_variable import sharding_of


class Rule(abc.ABC):
    """How one layer runs on shards; `stays_sharded` is of its output."""

    # The dims of the output and the input that can be sharded, counted from the
    # right (negative); None if they are whole.
    source_dim: int | None = None
    sink_dim: int | None = None
    # Whether the output is sharded only if the input is.
    propagates = False
    # Whether its inputs may come as `sequence.copy_to_region` has them.
    shares_input = False
    # Whether the rule of an outer layer decides `stays_sharded`.
    is_inner = False

    def __init__(self, layer):
        self.layer = layer
        self.reset()

    def reset(self) -> None:
        """Gathers the output, unless the user chose otherwise."""
        if not self.is_inner:
            self.stays_sharded = not getattr(self.layer, "gather_output", True)

    def keep_sharded(self, stays_sharded: bool, reason: str | None) -> None:
        """Applies the result of the analysis, or what the user chose."""
        if getattr(self.layer, "gather_output", None) is None:
            self.stays_sharded = stays_sharded
        elif self.stays_sharded and not stays_sharded:
            raise ValueError(
                "The sharded output of a column-parallel layer must be used "
                f"sharded. Received: {self.layer.name!r} with "
                "gather_output=False, but "
                f"{reason or 'what follows needs the whole'}. Set "
                "gather_output=True, or let a `RowParallelDense` follow."
            )

    @property
    def collectives(self) -> tuple[str, ...]:
        """The collectives of one forward and backward, in words."""
        if self.propagates:
            return ()
        if self.source_dim is None:
            return ("all-reduce of the output",)
        gathers = () if self.stays_sharded else ("all-gather of the output",)
        return ("all-reduce of the input's gradient", *gathers)

    def divides(self, args, kwargs) -> bool:
        """Whether a call with these arguments returns a sharded output."""
        return self.source_dim is not None and self.why_whole() is None

    def why_whole(self) -> str | None:
        """Why the layer itself never leaves its output sharded."""
        layer = self.layer
        if getattr(layer, "gather_output", None):
            return "it asks for it, with gather_output=True"
        if layer.activity_regularizer is not None:
            return "its activity regularizer looks at the whole"
        activation = getattr(layer, "activation", None)
        if acts_on_elements(activation):
            return None
        name = getattr(activation, "__name__", type(activation).__name__)
        return f"its activation {name!r} needs the whole"

    @property
    def sum_layer(self):
        """The layer that sums over ranks: itself, or one inside it."""
        return self.layer

    def scatters(self, args, kwargs) -> bool | None:
        """Whether a call can leave its sum sharded; None if it has none."""
        return None

    @abc.abstractmethod
    def run(self, inputs, *args, **kwargs):
        """Runs the layer's `call` on shards, in replica context."""

    def gather_output(self, output):
        """The output, gathered unless it stays sharded."""
        if self.stays_sharded:
            return output
        dim = output.shape.rank + self.source_dim
        return rank_collectives.gather_from_ranks(output, dim)

    def activate(self, output):
        """Applies the layer's activation, to the shard if that is the same."""
        activation = self.layer.activation
        if activation is None:
            return self.gather_output(output)
        if acts_on_elements(activation):
            return self.gather_output(activation(output))
        # Such as softmax, which needs the whole tensor.
        return activation(self.gather_output(output))

    def shard_input(self, inputs):
        """The sharded input, from a sharded or a whole one."""
        if self.is_sharded(inputs):
            return inputs
        dim = inputs.shape.rank + self.sink_dim
        return rank_collectives.scatter_to_ranks(inputs, dim)

    def whole_size(self) -> int:
        """The size of `sink_dim` in full, of a rule that has one."""
        raise TypeError(f"{type(self).__name__} takes no part of an input.")

    def is_sharded(self, inputs) -> bool:
        """Whether an input is this rank's shard; one of unknown size is not."""
        return inputs.shape[self.sink_dim] not in (None, self.whole_size())


def runs_as(layer, kinds, *methods: str) -> bool:
    """Whether a layer computes what one of these classes of Keras does.

    A subclass may override `methods`, or properties, that `call` uses.
    """
    kind = layer.__class__  # without its adapter (in_place.py)
    return any(
        all(
            getattr(kind, name, None) is getattr(known, name)
            for name in ("call", *methods)
        )
        for known in kinds
    )


def shard_of(variable):
    """This rank's shard of a Keras variable, in the dtype to compute with."""
    given = step_context.current().ranks.given_shards
    if id(variable) in given:
        return tf.cast(given[id(variable)], variable.dtype)
    with rank_collectives.local_shards():
        return tf.convert_to_tensor(variable)


def assign_shard(variable, value) -> None:
    """Assigns this rank's shard of a Keras variable."""
    value = tf.cast(value, variable.dtype)
    given = step_context.current().ranks.given_shards
    if id(variable) in given:
        given[id(variable)] = value
        return
    # Not by the Keras variable, which checks whole shapes.
    with rank_collectives.local_shards():
        variable.value.assign(value)


def local_shard_along(variable, dim):
    """This rank's shard of a variable, sharded along `dim` or replicated."""
    if sharding_of(variable).model_dim == dim:
        return shard_of(variable)
    whole = tf.convert_to_tensor(variable)
    return rank_collectives.scatter_to_ranks(whole, dim)


def on_shards(layer, name: str = "kernel", **others):
    """The layer with this rank's shard of its `"kernel"` or `"embeddings"`.

    `others` are further attributes that differ. `enable_lora` of a Keras layer
    adds a product to its kernel, `K + s A B`, and trains A and B in its place.
    The product's shard needs a shard of B along the last dim of K, and of A
    along others; each rank uses the other one separately. Hu et al., LoRA:
    Low-Rank Adaptation of Large Language Models (2022), equation 3.
    """
    weight = layers.weight_of(layer, name)
    if layer.lora_enabled:
        names = f"lora_{name}_a", f"lora_{name}_b"
        a, b = (getattr(layer, each) for each in names)
        dim = sharding_of(weight).model_dim
        if dim == len(weight.shape) - 1:
            shards = _copied(a), local_shard_along(b, 1)
        else:
            shards = local_shard_along(a, dim), _copied(b)
        others |= zip(names, shards)
    shard, shape = shard_of(weight), f"{name}_shape"
    if shape in instances.attributes_of(layer):
        # To which Keras 3.16 reshapes what a quantized weight stands for.
        others[shape] = tuple(shard.shape)
    return layers.with_weight(layer, name, shard, **others)


def call(layer, *args, **kwargs):
    """Calls a layer, or a copy of one, as Keras does."""
    kind = layer.__class__  # without its adapter (in_place.py)
    if layer.quantization_mode is not None:
        return kind.quantized_call(layer, *args, **kwargs)
    return kind.call(layer, *args, **kwargs)


def _copied(variable):
    return rank_collectives.copy_to_ranks(tf.convert_to_tensor(variable))
