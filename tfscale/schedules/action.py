"""The actions of a pipeline, and the actions that each of them needs.

    F  forward of one microbatch through one stage
    B  backward: gradients of the stage's input and, unless the schedule has
       a W of its own for that stage and microbatch, of its weights too
    W  gradients of the weights alone (zero-bubble schedules, Qi et al. 2023)
    U  update of the stage's weights by the gradient of a batch, in schedules
       that run several batches without a flush (PipeDream)

`F1.3` is the forward of microbatch 3 through stage 1, `U1.3` the update of
stage 1 by batch 3.
"""

import re
from typing import NamedTuple

KINDS = ("F", "B", "W")


class Action(NamedTuple):
    """One piece of work of a pipeline; prints as, e.g., `F1.3`.

    Args:
        kind: `"F"`, `"B"`, `"W"` or `"U"`, see the legend of the module.
        stage: Index of the stage, from 0.
        microbatch: Index of the microbatch, from 0; of a U, of the batch.

    Example:

    >>> str(Action("F", 1, 3))
    'F1.3'
    >>> Action.parse("B0.2")
    Action(kind='B', stage=0, microbatch=2)
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Reads what `str` prints; a `ValueError` says what it expected."""
        match = re.fullmatch(r"([FBWU])(\d+)\.(\d+)", text)
        if not match:
            raise ValueError(
                "An action must be a kind out of F, B, W and U, a stage, a "
                f"dot and a microbatch. Received: {text!r}. Write, for "
                "example, 'F1.3' for the forward of microbatch 3 through "
                "stage 1."
            )
        return cls(match[1], int(match[2]), int(match[3]))


def dependencies(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The actions whose results `action` needs.

    A chain suffices: skip connections only ever go forward, so the results of
    all earlier stages are there once the stage just before is done. A U needs
    what its device has done before it, which a `Schedule` checks.

    >>> [str(a) for a in dependencies(Action("B", 0, 2), num_stages=4)]
    ['F0.2', 'B1.2']
    """
    kind, stage, microbatch = action
    if kind == "U":
        return ()
    if kind == "F":
        return (Action("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (Action("B", stage, microbatch),)
    if stage == num_stages - 1:
        return (Action("F", stage, microbatch),)
    return (Action("F", stage, microbatch), Action("B", stage + 1, microbatch))
