"""A flag for a finite number: the bounds of absl's flags let a NaN pass."""

import math

from absl import flags


def define(name: str, default: float, help: str, **bounds: float):
    """As `flags.DEFINE_float`, and refuses NaN and infinity.

    Args:
        name: String, the flag.
        default: Float.
        help: String, what it is.
        **bounds: `lower_bound` and `upper_bound`.
    """
    holder = flags.DEFINE_float(name, default, help, **bounds)
    flags.register_validator(
        name, math.isfinite, message=f"--{name} must be a finite number."
    )
    return holder
