"""Private parts of how Keras reads a `PyDataset`: its workers and order.

Each name is listed in `keras_names`, with why.
"""

import itertools
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import in_place
from tfscale._internals import releases
from tfscale._internals.fitting import go_on_with
from tfscale._internals.fitting import probing_model
from tfscale._internals.instances import view
from tfscale._internals.symbols import NUM_BATCHES_KEPT
from tfscale._internals.symbols import EpochIterator
from tfscale._internals.symbols import GeneratorDataAdapter
from tfscale._internals.symbols import PyDatasetAdapter


def first_batches_from_python(epochs: EpochIterator) -> tf.data.Dataset | None:
    """Batches like those of a generator or a `PyDataset` in `fit`.

    The workers of a `PyDataset` then start with the first epoch only. Batches
    of a generator are those that Keras has kept, batches of a `PyDataset` are
    read by index; None if the data is neither.
    """
    adapter: Any = epochs.data_adapter
    if isinstance(adapter, GeneratorDataAdapter | PyDatasetAdapter):
        in_place.put(adapter, _AtRest, epochs=weakref.ref(epochs))
    if isinstance(adapter, GeneratorDataAdapter):
        kept = itertools.islice(adapter.generator(), NUM_BATCHES_KEPT)
        return GeneratorDataAdapter(kept).get_tf_dataset()
    if isinstance(adapter, PyDatasetAdapter):
        beside = view(
            adapter,
            enqueuer=property(lambda self: None),
            shuffle=property(lambda self: False),
        )
        return beside.get_tf_dataset().take(1)
    return None


class _AtRest(in_place.Mixin):
    """Members of the adapter of data from Python: a probe is no epoch.

    Keras would keep batches that workers prepared for it: the first epoch had
    up to eleven batches twice, and missed as many. Before a later validation
    with a number of steps it would go on with the iterator of the earlier one,
    whose workers have stopped.
    """

    epochs: weakref.ref[EpochIterator]

    def on_epoch_begin(self):
        if probing_model() is None:
            super().on_epoch_begin()
        else:
            go_on_with(self.epochs(), None, 0)


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


def keep_order(epochs: EpochIterator) -> None:
    """Records the order of the batches of a `PyDataset` for `order_of`."""
    adapter = epochs.data_adapter
    if not isinstance(adapter, PyDatasetAdapter) or not adapter.shuffle:
        return
    if adapter.py_dataset.num_batches is None or _ordered(epochs) is not None:
        return
    shuffling: Any = adapter
    mixin: type = _OrderedAdapter
    if adapter.enqueuer is not None:
        shuffling, mixin = adapter.enqueuer, _OrderedEnqueuer
        shuffling.shuffle = False
    in_place.put(shuffling, mixin, order=None, next_order=None)


def epoch_of_order(epochs: EpochIterator) -> int | None:
    """The number by which Keras shuffles the next epoch, if by one."""
    return releases.epoch_of_order(epochs.data_adapter)


def set_epoch_of_order(epochs: EpochIterator, epoch: int | None) -> None:
    """Has epochs go on with a result of `epoch_of_order`."""
    releases.set_epoch_of_order(epochs.data_adapter, epoch)


def order_of(epochs: EpochIterator, is_read: bool) -> list[int] | None:
    """The order of the current iterator, or None if it is not known."""
    ordered = _ordered(epochs)
    if ordered is None or not (
        is_read or isinstance(ordered, _OrderedEnqueuer)
    ):
        return None
    return ordered.order


def set_order(epochs: EpochIterator, order: list[int] | None) -> None:
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
