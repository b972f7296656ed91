"""What is decided of a model while its activations are sharded, in steps.

A pass over the graph returns changes, functions of the choices before it.
"""

import dataclasses


@dataclasses.dataclass
class Choices:
    """What is decided so far; each only ever moves on, so that it ends.

    Attributes:
        modes: By name of the operation of a `Point`: None, then "scatter", or
            "all_gather" and after it "gather"; at last "never".
        partial_gradients: Ids of crossings that use their weights on parts.
        not_partial: Those for which that was found wrong.
        replicated: Keys of the sums that are whole on all ranks.
        infeasible: Why nothing can be sharded, if so.
    """

    modes: dict = dataclasses.field(default_factory=dict)
    partial_gradients: set = dataclasses.field(default_factory=set)
    not_partial: set = dataclasses.field(default_factory=set)
    replicated: set = dataclasses.field(default_factory=set)
    infeasible: str | None = None


def set_mode(point, mode):
    """A change: what is done at a point."""

    def change(choices):
        choices.modes[point.name] = mode

    return change


def set_not_partial(key):
    """A change: a layer does not use its weights on parts."""

    def change(choices):
        choices.partial_gradients.discard(key)
        choices.not_partial.add(key)

    return change


def set_infeasible(reason):
    """A change: nothing is sharded."""

    def change(choices):
        choices.infeasible = reason

    return change


def set_partial(key):
    """A change: a layer uses its weights on parts."""

    def change(choices):
        choices.partial_gradients.add(key)

    return change


def set_replicated(key):
    """A change: the sum of a call stays whole."""

    def change(choices):
        choices.replicated.add(key)

    return change
