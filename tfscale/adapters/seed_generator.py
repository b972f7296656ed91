"""A seed generator of a mesh, whose seeds depend on replica and rank."""

from collections.abc import Callable
from typing import Any

import keras

from tfscale._internals import in_place


class MeshSeedGenerator(in_place.Mixin):
    """Members that are put before the class of a seed generator.

    `seed_here` computes, from the generator and the seed of one device, that
    of the replica and rank; `is_for_shard` says whether a draw is for a shard.
    """

    seed_here: Callable[[Any, Any], Any]
    is_for_shard: Callable[[], bool] = staticmethod(lambda: False)

    def next(self, ordered=True):
        """See `keras.random.SeedGenerator`."""
        return self.seed_here(self, super().next(ordered))


def adapt_generator(
    generator: keras.random.SeedGenerator, **attributes: Any
) -> None:
    """Puts the class of this module before a generator's; sets attributes."""
    in_place.put(generator, MeshSeedGenerator, **attributes)
