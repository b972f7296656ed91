"""How many rows a microbatch may have: found while the model trains.

The update is the same for every number of microbatches, so sizes are tried by
the steps of `fit` themselves, from one row on. What a row takes is bounded by
what a step took beyond weights, slots and gradients; so it is known what more
rows need before they are tried:

    memory
    1.0 |................................. limit
        |                    ___----- x chosen
        |         ____----- 4
        |- 1 -- 2
   idle |
        +---------------------------------- rows
"""

import math

# So much of a step may be hidden by what it takes after its microbatches, that
# more at once would be a risk.
_GROWTH = 2
# What is no more than this times what it was has not risen.
_RISE = 1.02


class MicrobatchSize:
    """The number of rows, as it is found.

    Args:
        idle: What is taken of the memory by weights, slots and the sums of
            gradients; 1.0 is all.
        gradients: What the gradients of a microbatch take.

    Attributes:
        rows: How many rows a microbatch of the next step has at most.
        is_found: Whether that stays.

    >>> size = MicrobatchSize(idle=0.1, gradients=0.0)
    >>> while not size.is_found:
    ...     print(size.rows)
    ...     size.note(0.1 + 0.01 * size.rows, num_rows=256)
    1
    2
    4
    8
    16
    32
    64
    90
    >>> size.rows  # of 256 rows: three microbatches
    90
    """

    def __init__(self, idle: float, gradients: float):
        self.rows = 1
        self.is_found = False
        self._idle, self._gradients = idle, gradients
        self._before: tuple[int, float] | None = None
        self._num_rows = 0

    def note(self, peak: float, num_rows: int) -> None:
        """Decides on the next step.

        Args:
            peak: What this step took of the memory, 1.0 for all of it.
            num_rows: How many rows its batch had (that of a replica).
        """
        self._num_rows = max(self._num_rows, num_rows, 1)
        if self.is_found or num_rows < self._num_rows:
            return  # a last or an empty batch says little of the others
        rows = self.rows
        rows_before, peak_before = self._before or (rows, peak)
        if peak > _RISE * peak_before:
            by_row = max(
                (peak - self._idle) / rows,
                (peak - peak_before) / (rows - rows_before),
            )
        else:
            # An update takes as much: of the microbatch there is no more in it
            # than beyond gradients and their sums.
            by_row = (peak - self._idle - self._gradients) / rows
        if by_row > 0:
            fitting = rows + (1.0 - peak) / by_row
        else:
            fitting = math.inf if peak <= 1.0 else rows_before
        self._before = rows, peak
        if peak > 1.0:
            self.rows, self.is_found = max(1, math.floor(fitting)), True
            return
        self.rows = math.floor(min(num_rows, _GROWTH * rows, fitting))
        # As many microbatches as before: that is the number.
        self.is_found = -(-num_rows // self.rows) == -(-num_rows // rows)
