"""Of several workers one writes a file, or each its own.

All workers run the same program and have the same weights. If all of them save
to one path they write into the same file at the same time.
"""

import os
from typing import Any

from tfscale import in_place


class SavedByOneWorker(in_place.Mixin):
    """What is put in front of the class of a model that workers train."""

    def save(self, filepath, *args, **kwargs):
        """See `keras.Model.save`; raises if another worker saves there."""
        check(self.distribute_strategy, filepath)
        super().save(filepath, *args, **kwargs)

    def save_weights(self, filepath, *args, **kwargs):
        """See `keras.Model.save_weights`; one worker writes the file."""
        check(self.distribute_strategy, filepath)
        super().save_weights(filepath, *args, **kwargs)


def check(strategy: Any, filepath: Any) -> None:
    """Raises if another worker writes to a path.

    Args:
        strategy: A `MeshStrategy` over workers.
        filepath: Where this worker is about to write.

    Raises:
        ValueError: If so.
    """
    path = str(filepath)
    if "://" not in path:
        path = os.path.abspath(path)
    workers = strategy.extended.workers
    writer = workers.coordination.first_to_claim(path)
    if writer != workers.index:
        raise ValueError(
            "One worker must write a file, as all have the same weights. "
            f"Received: {path!r} in worker {workers.index}, where worker "
            f"{writer} writes. Save under "
            "`if strategy.is_chief:`, and give callbacks that save to that "
            "worker only; or name the file after the worker."
        )
