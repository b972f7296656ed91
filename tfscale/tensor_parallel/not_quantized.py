"""The base of what runs a layer on ranks: it refuses to be quantized."""

from typing import Any

import keras

from tfscale import _internals
from tfscale import in_place


class NotQuantized(in_place.Mixin):
    """A layer that Keras would leave as it is, as one of a class unknown to it.

    Its rules are for float kernels, and some layouts name dims that a
    quantized kernel does not have.
    """

    @property
    def quantize(self) -> Any:
        """See `keras.Layer`, whose constructor sets it on each layer.

        A property, because only that comes before what is set on an object.
        """
        has_one = self.__class__.quantize is not keras.Layer.quantize
        if has_one and not isinstance(self, keras.Model):
            return self._refuse
        return _internals.attributes_of(self)["quantize"]

    def _refuse(self, mode=None, **kwargs):
        del kwargs
        raise ValueError(
            "A layer that runs on model ranks cannot be quantized. Received: "
            f"`quantize` with mode={mode!r}, for {self.path!r} of type "
            f"{type(self).__name__}. Load the trained weights into a plain "
            "model, made outside of the strategy's scope, and quantize that. "
            "Layers before this one may be quantized already: do not go on "
            "with this model."
        )
