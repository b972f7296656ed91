"""Which batch size a noise scale asks for, and which learning rate that."""

import math

LEARNING_RATES = ("adascale", "sqrt")


def sizes_around(
    start: int, smallest: int, largest: int, multiple: int
) -> list[int]:
    """The batch sizes to choose from: `start`, halved and doubled.

    Each size that is used is traced once; so there are few.

    Args:
        start: That of the beginning.
        smallest: No size is smaller.
        largest: No size is larger.
        multiple: What sizes have to be multiples of.
    """
    sizes = [start]
    while sizes[-1] * 2 <= largest:
        sizes.append(sizes[-1] * 2)
    while sizes[0] % (2 * multiple) == 0 and sizes[0] // 2 >= smallest:
        sizes.insert(0, sizes[0] // 2)
    return sizes


def nearest(sizes: list[int], noise_scale: float) -> int:
    """The size whose ratio to the noise scale is nearest to 1."""
    if math.isinf(noise_scale):
        return sizes[-1]
    target = math.log(max(noise_scale, 1.0))
    return min(sizes, key=lambda size: abs(math.log(size) - target))


def rate_factor(
    rule: str, start: int, size: int, square: float, variance: float
) -> float:
    """By what to multiply the learning rate of the batch size `start`.

    Args:
        rule: "adascale" or "sqrt".
        start: The batch size that the learning rate was chosen for.
        size: The batch size now.
        square: |G|^2, see `GradientNoise`; 0 or more.
        variance: S, see `GradientNoise`; 0 or more.
    """
    if rule == "sqrt":
        return math.sqrt(size / start)
    total = variance / size + square
    return (variance / start + square) / total if total else 1.0
