"""A layer with boundaries around its methods, in the place of Keras' own.

There is one around `call`, where tensors are gathered or sharded as a plan
has it, and one around each method that looks at shapes of what the layer has
put in, and no more: it gets whole tensors while the layer goes on with parts.
"""

import keras

from tfscale import _internals
from tfscale import in_place
from tfscale.tensor_parallel.rules.sharded_call import NotQuantized
from tfscale.tensor_parallel.sequence_parallel.sequence import Boundary

_ATTENTION_MASK, _SELF_ATTENTION_MASK = _internals.METHODS_OF_SHAPES


def attach(layer: keras.Layer) -> None:
    """Puts boundaries around the methods of a layer; once."""
    if isinstance(layer, BoundaryLayer):
        return
    in_place.put(layer, BoundaryLayer, boundary=Boundary(layer))
    if hasattr(layer, _ATTENTION_MASK):
        boundary = Boundary(layer, of_shapes=True)
        in_place.put(
            layer, BoundaryAttentionMask, attention_mask_boundary=boundary
        )
    if hasattr(layer, _SELF_ATTENTION_MASK):
        boundary = Boundary(layer, of_shapes=True)
        in_place.put(
            layer,
            BoundarySelfAttentionMask,
            self_attention_mask_boundary=boundary,
        )


def boundary_of(layer: keras.Layer) -> Boundary | None:
    """The boundary around the `call` of a layer, if there is one."""
    return layer.boundary if isinstance(layer, BoundaryLayer) else None


class BoundaryLayer(NotQuantized):
    """A layer whose inputs and outputs are converted."""

    boundary: Boundary

    def call(self, *args, **kwargs):
        """See `keras.Layer`."""
        return self.boundary.run(super().call, args, kwargs)


class BoundaryAttentionMask(in_place.Mixin):
    """A layer that makes a mask of the shapes of its queries and keys."""

    attention_mask_boundary: Boundary

    def _compute_attention_mask(self, *args, **kwargs):
        return self.attention_mask_boundary.run(
            super()._compute_attention_mask, args, kwargs
        )


class BoundarySelfAttentionMask(in_place.Mixin):
    """A layer that makes a mask of the shape of its input."""

    self_attention_mask_boundary: Boundary

    def _compute_self_attention_mask(self, *args, **kwargs):
        return self.self_attention_mask_boundary.run(
            super()._compute_self_attention_mask, args, kwargs
        )
