"""Private parts of how Keras reads a `PyDataset`: its workers and order.

Each name is listed in `keras_names`, with why.
"""

from typing import Any

import keras

from tfscale._internals import in_place
from tfscale._internals import releases
from tfscale._internals.symbols import TFEpochIterator


class _Ordered(in_place.Mixin):
    """Members of the object that shuffles the batches of a `PyDataset`."""

    py_dataset: keras.utils.PyDataset
    order: list[int] | None
    next_order: list[int] | None

    def draw_order(self, epoch: int | None) -> None:
        """Draws an order as Keras does, or uses the order that was set."""
        self.order, self.next_order = self.next_order, None
        if self.order is None:
            order = list(range(self.py_dataset.num_batches))
            releases.shuffle_batches(order, epoch)
            self.order = order


class _OrderedAdapter(_Ordered):
    """For a `PyDataset` without workers, which shuffles at the first batch."""

    def _finite_generator(self):
        self.draw_order(releases.epoch_of_order(self))
        for index in self.order:
            yield self._standardize_batch(self.py_dataset[index])


class _OrderedEnqueuer(_Ordered):
    """For the workers' enqueuer: it shuffles before they start."""

    def start(self, *epoch):
        if not self.is_running():
            self.draw_order(*epoch or (None,))
        super().start(*epoch)

    @property
    def indices(self):
        return self._indices

    @indices.setter
    def indices(self, indices):
        # Keras' indices of a new run are in order.
        self._indices = iter(self.order)


def keep_order(epochs: TFEpochIterator) -> None:
    """Records the order of the batches of a `PyDataset` for `order_of`."""
    adapter = epochs.data_adapter
    if not hasattr(adapter, "py_dataset") or not adapter.shuffle:
        return
    if adapter.py_dataset.num_batches is None or _ordered(epochs) is not None:
        return
    shuffling: Any = adapter
    mixin: type = _OrderedAdapter
    if adapter.enqueuer is not None:
        shuffling, mixin = adapter.enqueuer, _OrderedEnqueuer
        shuffling.shuffle = False
    in_place.put(shuffling, mixin, order=None, next_order=None)


def order_of(epochs: TFEpochIterator, is_read: bool) -> list[int] | None:
    """The order of the current iterator, or None if it is not known."""
    ordered = _ordered(epochs)
    if ordered is None or not (
        is_read or isinstance(ordered, _OrderedEnqueuer)
    ):
        return None
    return ordered.order


def set_order(epochs: TFEpochIterator, order: list[int] | None) -> None:
    """Sets what `order_of` returned, for the iterator that is read next."""
    ordered = _ordered(epochs)
    if ordered is not None:
        ordered.next_order = order


def _ordered(epochs) -> Any:
    adapter = epochs.data_adapter
    for one in (adapter, getattr(adapter, "enqueuer", None)):
        if isinstance(one, _Ordered):
            return one
    return None
