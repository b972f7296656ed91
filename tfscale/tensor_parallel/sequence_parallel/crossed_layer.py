"""A layer with crossings around its methods, in the place of Keras' own.

There is one around `call`, where tensors are gathered or sharded as a plan
has it, and one around each method that looks at shapes of what the layer has
put in, and no more: it gets whole tensors while the layer goes on with parts.
"""

import keras

from tfscale import _internals
from tfscale import in_place
from tfscale.tensor_parallel.not_quantized import NotQuantized
from tfscale.tensor_parallel.sequence_parallel.sequence import Crossing

_ATTENTION_MASK, _SELF_ATTENTION_MASK = _internals.METHODS_OF_SHAPES


def attach(layer: keras.Layer) -> None:
    """Puts crossings around the methods of a layer; once."""
    if isinstance(layer, CrossedLayer):
        return
    in_place.put(layer, CrossedLayer, crossing=Crossing(layer))
    if hasattr(layer, _ATTENTION_MASK):
        crossing = Crossing(layer, of_shapes=True)
        in_place.put(
            layer, CrossedAttentionMask, attention_mask_crossing=crossing
        )
    if hasattr(layer, _SELF_ATTENTION_MASK):
        crossing = Crossing(layer, of_shapes=True)
        in_place.put(
            layer,
            CrossedSelfAttentionMask,
            self_attention_mask_crossing=crossing,
        )


def crossing_of(layer: keras.Layer) -> Crossing | None:
    """The crossing around the `call` of a layer, if there is one."""
    return layer.crossing if isinstance(layer, CrossedLayer) else None


class CrossedLayer(NotQuantized):
    """A layer whose inputs and outputs are converted."""

    crossing: Crossing

    def call(self, *args, **kwargs):
        """See `keras.Layer`."""
        return self.crossing.run(super().call, args, kwargs)


class CrossedAttentionMask(in_place.Mixin):
    """A layer that makes a mask of the shapes of its queries and keys."""

    attention_mask_crossing: Crossing

    def _compute_attention_mask(self, *args, **kwargs):
        return self.attention_mask_crossing.run(
            super()._compute_attention_mask, args, kwargs
        )


class CrossedSelfAttentionMask(in_place.Mixin):
    """A layer that makes a mask of the shape of its input."""

    self_attention_mask_crossing: Crossing

    def _compute_self_attention_mask(self, *args, **kwargs):
        return self.self_attention_mask_crossing.run(
            super()._compute_self_attention_mask, args, kwargs
        )
