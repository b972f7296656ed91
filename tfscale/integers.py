"""Integers that a user passes, checked by one rule."""

import numbers
from typing import Any

_MOST = 2**63  # of a tensor of int64


def check_integer(
    name: str, value: Any, least: int = 1, rule: str | None = None
) -> int:
    """The value of the argument `name`, an integer of 64 bits.

    `rule` says in an error what it must be, "an integer, 1 or more" say.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is less than `least`, or has more than 64 bits.

    >>> check_integer("num_devices", 2)
    2
    """
    rule = rule or f"an integer, {least} or more"
    message = f"`{name}` must be {rule}. Received: {name}={value!r}."
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        if isinstance(value, float) and value.is_integer():
            message += f" Use {name}={int(value)}."
        raise TypeError(message)
    number = int(value)
    if not least <= number < _MOST:
        raise ValueError(message)
    return number
