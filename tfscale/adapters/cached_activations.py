"""The two parts of a model: the second trains on cached activations.

`tfscale.cut` makes them, in `pipeline/cut_model.py`.
"""

import hashlib

import keras

from tfscale._internals import in_place


def adapt_prefix_and_suffix(prefix: keras.Model, suffix: keras.Model) -> None:
    """Has both models check that cached activations are up to date."""
    weights = CachedWeights(prefix.weights)
    in_place.put(prefix, PredictsToCache, cached_weights=weights)
    in_place.put(suffix, TrainsOnCache, cached_weights=weights)


def adapt_wrapped_suffix(wrapper: keras.Model, model: keras.Model) -> None:
    """Has what wraps a suffix check that, too; it does not call its `fit`."""
    if isinstance(model, TrainsOnCache):
        weights = model.cached_weights
        in_place.put(wrapper, TrainsOnCache, cached_weights=weights)


class CachedWeights:
    """The weights of the last computed activations."""

    def __init__(self, weights: list[keras.Variable]):
        self._weights = weights
        self.note()

    def note(self) -> None:
        """Notes that activations are computed now."""
        self._fingerprint = self._fingerprint_now()

    @property
    def have_changed(self) -> bool:
        """Whether activations would differ now."""
        return self._fingerprint_now() != self._fingerprint

    def _fingerprint_now(self):
        digest = hashlib.sha256()
        for weight in self._weights:
            digest.update(keras.ops.convert_to_numpy(weight).tobytes())
        return digest.digest()


class PredictsToCache(in_place.Mixin):
    """Members that are put before the class of a prefix."""

    cached_weights: CachedWeights

    def predict(self, x, *args, **kwargs):
        """See `keras.Model.predict`; a record always gives the same result."""
        recipe = getattr(x, "recipe", None)  # of `tfscale.data`
        if recipe is not None and (recipe.augment or recipe.shuffle):
            wrong = "augment" if recipe.augment else "shuffle"
            raise ValueError(
                "Activations are cached by record, in the order of the source "
                f"and without augmentation. Received: data with `{wrong}`. "
                "Remove it and pass shuffle=False; the pipeline of the cached "
                "activations may shuffle."
            )
        self.cached_weights.note()
        return super().predict(x, *args, **kwargs)


class TrainsOnCache(in_place.Mixin):
    """Members that are put before the class of a suffix."""

    cached_weights: CachedWeights

    def fit(self, *args, **kwargs):
        """See `keras.Model.fit`; refuses activations that are out of date."""
        if self.cached_weights.have_changed:
            raise ValueError(
                "Cached activations must come from the current weights of the "
                f"prefix. Received: {self.name!r}, whose prefix has changed "
                "since its last `predict`. Call `prefix.predict` again."
            )
        return super().fit(*args, **kwargs)
