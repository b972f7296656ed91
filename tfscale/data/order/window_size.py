"""How many records are mixed at a time where none can be read at random."""

from tfscale.data.caches import memory
from tfscale.data.sources.source import IndexedSource
from tfscale.data.sources.source import Source

_WINDOW_RECORDS = 512
_WINDOW_BYTES = 16 << 20  # or more records, where they are small
_COPIES = 4  # windows alive at a time: read, gathered, waiting, handed out


def choose(
    source: Source, shuffle: bool, window: int | None, budget: int
) -> int:
    """How many records are mixed at a time; `budget` is in bytes.

    Raises:
        ValueError: If what is asked for does not fit the budget.
    """
    if isinstance(source, IndexedSource) or not shuffle:
        return window or _WINDOW_RECORDS
    record = getattr(source, "record_bytes", 0) or memory.size_of(
        source.first()
    )
    fit = int(budget // (record * _COPIES + 1))
    if window is not None and min(window, source.num_records) > fit:
        raise ValueError(
            "The shuffle window must fit the memory budget. Received: "
            f"shuffle_window={window} records of {record:.0f} bytes, of which "
            f"{_COPIES} windows live at a time, and a budget of {budget} "
            f"bytes. Use {fit} or less, or a larger `ram_budget`."
        )
    if window is None:
        window = max(_WINDOW_RECORDS, int(_WINDOW_BYTES // (record + 1)))
    return max(min(window, fit), 1)
