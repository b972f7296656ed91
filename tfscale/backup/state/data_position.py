"""The position of a run in its data, and the way back to it.

A dataset of `tfscale.data` has a position, which is set. For any other dataset
it is the number of iterators created, because creating one moves the seeds of
its shuffles, and the number of batches drawn from the last one: as many are
created and drawn again. A `PyDataset` also has the order of its batches: Keras
shuffles with Python's `random`, whose state is later than that order.
"""

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfscale._internals import datasets
from tfscale._internals import fitting
from tfscale._internals import releases
from tfscale.adapters import py_dataset
from tfscale.backup.exactness import shuffles_late
from tfscale.backup.exactness import warn_of_earlier_iterators
from tfscale.data.chain.resumable_dataset import ResumableDataset
from tfscale.data.order.position import PositionValue
from tfscale.data.order.position import positions_of
from tfscale.graphs.dataset_graph import stages_of

# Settings of a dataset that change its speed, and not its records.
_SPEED = (
    *("buffer_output_elements", "num_parallel_calls"),
    *("prefetch_input_elements",),
)


# Iterators of each dataset that calls of `fit` have created.
_created: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


class DataPosition:
    """Counts the iterators and batches that epochs take of their data."""

    def __init__(self, epochs):
        self._epochs = epochs
        self._num_made = 0
        self._num_drawn = 0
        # Batches before these, from which a pipeline went on by its position.
        self._num_earlier = 0
        self._drawn_before = []  # of each iterator but the last one
        self._starts = self._values()
        py_dataset.keep_order(epochs)
        source = fitting.source_of(epochs)
        is_dataset = isinstance(source, tf.data.Dataset)
        self._source = source if is_dataset else None
        self._num_before = _created.get(source, 0) if is_dataset else 0
        self._shuffles_late = (
            is_dataset and self._pipeline is None and shuffles_late(source)
        )

    # Looked up each time: `GradientNoiseScale` may change the batch size.

    @property
    def _pipeline(self):
        return _pipeline_in(self._epochs)[0]

    @property
    def _is_direct(self):
        return _pipeline_in(self._epochs)[1]

    def _positions(self):
        """The positions of all pipelines in the data (of a `zip`, say)."""
        source = fitting.source_of(self._epochs)
        is_dataset = isinstance(source, tf.data.Dataset)
        return positions_of(source) if is_dataset else []

    def _values(self):
        return [position.value for position in self._positions()]

    @property
    def _has_endless_epochs(self):
        """Whether an iterator goes on from epoch to epoch."""
        return self._epochs.steps_per_epoch is not None

    @property
    def begins_anywhere(self) -> bool:
        """Whether an epoch goes on at any batch, in executions of any size."""
        return self._is_direct and not self._has_endless_epochs

    def iterator_made(self) -> None:
        """Called before an iterator is created."""
        if self._num_made:
            self._drawn_before.append(self._num_drawn)
        self._num_made += 1
        if self._source is not None:
            _created[self._source] = self._num_before + self._num_made
        self._num_drawn = self._num_earlier = 0
        self._starts = self._values()

    def drawn(self, count: int) -> None:
        """Called after training on batches."""
        self._num_drawn += count

    def end(self) -> None:
        """Sets the position to what was trained on; `fit` has ended."""
        if self._is_direct and self._num_made:
            self._pipeline.position.assign(**self._here()._asdict())

    def _here(self):
        (start,) = self._starts
        return self._pipeline.position_after(start, self._num_drawn)

    def identity(self) -> list[str]:
        """Facts that must be the same for a run to continue.

        A dataset of `tfscale.data` may have another batch size.
        """
        steps = self._epochs.steps_per_epoch
        found = [] if steps is None else [f"{steps} steps per epoch"]
        if self._is_direct:
            recipe = self._pipeline.recipe
            order = "shuffled" if recipe.shuffle else "in order"
            return [*found, f"{recipe.plan.limit} records", order]
        found.append(f"{self._epochs.data_adapter.num_batches} batches")
        source = fitting.source_of(self._epochs)
        if source is None:
            found += fitting.rows_of_arrays(self._epochs)
        elif isinstance(source, tf.data.Dataset) and self._pipeline is None:
            found += stages(source)
        return found

    def state(self) -> dict[str, Any]:
        """Integers for `resume`."""
        state = {
            "before": self._num_before,
            "made": self._num_made,
            "drawn": self._num_earlier + self._num_drawn,
            "known": fitting.known_batches(self._epochs),
            "epoch_of_order": releases.epoch_of_order(
                self._epochs.data_adapter
            ),
            "starts": [*map(list, self._starts)],
        }
        # An iterator that is not read yet is that of the next validation.
        after = self._values() if self._num_drawn else self._starts
        state["after"] = [*map(list, after)]
        if self._shuffles_late:
            state["drawn_before"] = [
                [number, len(list(same))]
                for number, same in itertools.groupby(self._drawn_before)
            ]
        if self._is_direct:
            state["position"] = list(self._here())
        return state

    def order(self) -> list[int] | None:
        """The order that Keras drew of a `PyDataset`, one for each worker."""
        return py_dataset.order_of(self._epochs, self._num_drawn > 0)

    def set_order(self, order: list[int] | None) -> None:
        """Sets a result of `order`, before `resume`."""
        py_dataset.set_order(self._epochs, order)

    def resume(self, state: dict[str, Any], step: int) -> int:
        """Returns to the position of a run, in an epoch that begins.

        Returns:
            Batches of the epoch that must not be trained on again; `skip` is
            then called for these.
        """
        if self._is_direct:
            position = PositionValue(*state["position"])
            self._pipeline.position.assign(**position._asdict())
            if not self._has_endless_epochs:
                if position.index == 0:
                    return 0
                # Of executions; the last one may have fewer batches.
                size = self._epochs.steps_per_execution
                whole = -(-int(self._pipeline.cardinality()) // size)
                return (whole - -(-self._pipeline.batches_left // size)) * size
        drawn = self._drawn_of_this_size(state)
        releases.set_epoch_of_order(
            self._epochs.data_adapter, state.get("epoch_of_order")
        )
        self._make_again(state, state["made"] - 1, state["starts"])
        if self._has_endless_epochs:
            self._go_on(drawn - step)
        return step

    def _drawn_of_this_size(self, state):
        """Batches of the last iterator, if all had been of this size."""
        known, now = state["known"], fitting.known_batches(self._epochs)
        if not (self._is_direct and known and now):
            fitting.set_known_batches(self._epochs, known)
            return state["drawn"]
        whole = int(self._pipeline.cardinality())
        # A pipeline that is repeated has rounds.
        rounds_left = (known - state["drawn"] - 1) // (known * whole // now)
        return now - rounds_left * whole - self._pipeline.batches_left

    def resume_after(self, state: dict[str, Any], num_probes: int) -> None:
        """Returns to the position of a run between two of its validations.

        Args:
            state: Result of `state`.
            num_probes: Batches that Keras looks at before each validation. It
                has done so in this process, with an iterator of the earlier
                process too. Later ones are of the iterator of the validation
                before, if that has a number of steps.
        """
        if self._is_direct:
            (after,) = state["after"]
            position = PositionValue(*after)
            # A probe begins an epoch, or goes on with one of some steps.
            if not self._has_endless_epochs:
                position = position._replace(epoch=position.epoch + num_probes)
            self._pipeline.position.assign(**position._asdict())
        else:
            fitting.set_known_batches(self._epochs, state["known"])
        # Validation has a new iterator each time, whatever its steps.
        last = self._make_again(state, state["made"], state["after"])
        if last is None:
            return
        for _ in range(num_probes):
            if not self._has_endless_epochs or next(last, None) is None:
                next(fitting.make_iterator(self._epochs), None)
            self._num_drawn += 1

    def _make_again(self, state, count, positions):
        """Creates iterators again, to move seeds; returns the last or None.

        Those that also move seeds while they are read are read as far as
        before. `positions` are then set.
        """
        iterator = None
        if self._is_direct:
            return None
        before = state.get("before", 0)
        warn_of_earlier_iterators(self._epochs, self._num_before, before)
        drawn = [0] * count
        if "drawn_before" in state:
            before = state["drawn_before"]
            drawn = [number for number, times in before for _ in range(times)]
            drawn.append(state["drawn"])
        for number in drawn[self._num_made : count]:
            iterator = fitting.make_iterator(self._epochs)
            self._draw(iterator, number)
            self._num_drawn = number
        for position, value in zip(self._positions(), positions):
            position.assign(**PositionValue(*value)._asdict())
        return iterator

    def _go_on(self, drawn):
        """Creates the iterator of all epochs, and draws its batches again."""
        iterator = fitting.make_iterator(self._epochs)
        if self._is_direct:
            self._num_earlier = drawn
        else:
            self._draw(iterator, drawn)
            self._num_drawn = drawn
        fitting.go_on_with(self._epochs, iterator, drawn)

    def skip(self, iterator: Iterator[Any], count: int) -> None:
        """Skips batches that a run has trained on before."""
        if self._is_direct:
            self._num_earlier += count
        else:
            self._draw(iterator, count)
            self._num_drawn += count

    def _draw(self, iterator, count):
        """Draws batches and drops them.

        The last step of several batches may have found fewer, if the length of
        the data is unknown.
        """
        for number in range(count):
            if next(iterator, None) is None:
                if count - number < self._epochs.steps_per_execution:
                    return
                raise ValueError(
                    "A run must continue with the same data. Received: fewer "
                    "batches than it had trained on. Pass the same data, or "
                    "use another `backup_dir`."
                )


def _pipeline_in(epochs):
    """The pipeline in the data of epochs, and whether its batches are theirs.

    An epoch of Keras that ends with a `repeat` has several of the pipeline.
    """
    dataset, is_direct = fitting.source_of(epochs), True
    same = ["prefetch", "options"]
    if epochs.steps_per_epoch is not None:
        same.append("repeat")
    while isinstance(dataset, tf.data.Dataset):
        if isinstance(dataset, ResumableDataset):
            return dataset, is_direct
        kind = type(dataset).__name__.lower()
        if not any(word in kind for word in same):
            is_direct = False
        inputs = datasets.inputs_of(dataset)
        dataset = inputs[0] if len(inputs) == 1 else None
    return None, False


def stages(dataset: tf.data.Dataset) -> list[str]:
    """The stages of a dataset with their integers, such as seeds and sizes.

    Functions, names of files and numbers of threads are left out.
    """
    found = []
    for stage in stages_of(dataset):
        if not stage.is_a("Prefetch", "Options"):
            integers = [
                value
                for name, value in stage.settings.items()
                if type(value) is int and name not in _SPEED
            ]
            found.append(f"{stage.kind}{integers}")
    return found
