"""What is private in a `fit` that runs: its epochs, and where it stands.

Each name is listed in `keras_names`, with why.
"""

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import Protocol

import keras
import tensorflow as tf

from tfscale._internals.symbols import CallbackList
from tfscale._internals.symbols import EpochIterator
from tfscale._internals.symbols import PerReplicaSpec

# What callbacks of Keras keep for later steps, beside public attributes.
MODEL_CHECKPOINT_COUNTERS = (
    "_batches_seen_since_last_saving",
    "_last_batch_seen",
    "_current_epoch",
)
SWAP_EMA_STATE = ("_ema_weights_in_model",)
TENSORBOARD_STEPS = (
    "_global_train_batch",
    "_global_test_batch",
    "_previous_epoch_iterations",
)


class Watcher(Protocol):
    """What is told, and asked, by an epoch iterator that is watched."""

    def iterator_made(self) -> None:
        """An iterator over the data is about to be made."""

    def begin_epoch(self) -> int:
        """An epoch begins; returns how many of its steps are done already."""

    def skip(self, iterator: Iterator[Any]) -> None:
        """A step of those is passed over."""

    def between_steps(self, step: int, iterator: Iterator[Any]) -> None:
        """All callbacks have ended the step before and none has begun this."""


def running_fit(model: keras.Model) -> tuple[EpochIterator, CallbackList]:
    """The epochs and the callbacks of the `fit` of a model on the stack.

    They are local variables of `fit`: Keras gives callbacks no way to them.

    Raises:
        RuntimeError: If no `fit` of the model runs in this thread.
    """
    # Not its own frame, which would be in a cycle with its variables.
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_locals.get("self") is model:
            values = list(frame.f_locals.values())
            epochs = [v for v in values if isinstance(v, EpochIterator)]
            lists = [v for v in values if isinstance(v, CallbackList)]
            if epochs and lists:
                return epochs[0], lists[0]
        frame = frame.f_back
    raise RuntimeError(
        "The callback works in `fit` of its model. Received: `on_train_begin` "
        "outside of it. In a loop of your own use `tf.train.Checkpoint`."
    )


def callers() -> Iterator[types.FrameType]:
    """The frames of this thread, from the innermost on."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def model_that_looks_at_data() -> keras.Model | None:
    """The model for which Keras draws a batch only to see what it is like."""
    look = keras.Model._maybe_symbolic_build.__code__
    for frame in callers():
        if frame.f_code is look:
            return frame.f_locals["self"]
    return None


def keras_predicts() -> bool:
    """Whether `predict` of a model is on the stack of this thread."""
    predict = inspect.unwrap(keras.Model.predict).__code__
    return any(frame.f_code is predict for frame in callers())


def epochs_keras_reads(
    frame: types.FrameType | None = None,
) -> list[tuple[str, EpochIterator]]:
    """The epochs over data of Keras' methods on a stack, the innermost first.

    Args:
        frame: The innermost frame; by default that of the caller.

    Returns:
        A list of pairs of what for, which is "fit", "evaluate", "predict", or
        "look" of a batch drawn to see what it is like, and the epochs.
    """
    purposes = {keras.Model._maybe_symbolic_build.__code__: "look"}
    for name in ("fit", "evaluate", "predict"):
        purposes[inspect.unwrap(getattr(keras.Model, name)).__code__] = name
    found = []
    frame = frame or sys._getframe()
    while frame is not None:
        purpose = purposes.get(frame.f_code)
        if purpose is not None:
            name = "iterator" if purpose == "look" else "epoch_iterator"
            # None of a batch that `train_on_batch` was given.
            epochs = frame.f_locals.get(name)
            if epochs is not None:
                found.append((purpose, epochs))
        frame = frame.f_back
    return found


def data_keras_reads() -> list[tuple[str, list[tf.data.Dataset]]]:
    """Datasets of `epochs_keras_reads`, of all threads."""
    return [
        (purpose, _datasets_of(_given_to(epochs)))
        for frame in sys._current_frames().values()
        for purpose, epochs in epochs_keras_reads(frame)
    ]


def reader_of(distributed: Any) -> tuple[str, EpochIterator] | None:
    """What Keras makes an iterator over a distributed dataset for, if it does.

    As `epochs_keras_reads`, of this thread.
    """
    for purpose, epochs in epochs_keras_reads():
        if epochs._distributed_dataset is distributed:
            return purpose, epochs
    return None


class _Stepped:
    """Members of an epoch iterator whose class was taken over."""

    on_step: Callable[[int], None]

    def __next__(self):
        self.on_step(0)
        begin, end, iterator = super().__next__()
        self.on_step(end + 1 - begin)
        return begin, end, iterator


def tell_steps(epochs: EpochIterator, on_step: Callable[[int], None]) -> None:
    """Calls a function with the batches of each step, before it is run.

    And with none behind each. It is called at once for the step whose iterator
    is being made.
    """
    if not isinstance(epochs, _Stepped):
        epochs.__class__ = taken_over(_Stepped, type(epochs))
        on_step(epochs.steps_per_execution)
    epochs.on_step = on_step


def _datasets_of(source):
    if not isinstance(source, tf.distribute.DistributedDataset):
        return [source] if isinstance(source, tf.data.Dataset) else []
    # Of a function, or else of a dataset.
    if hasattr(source, "_datasets"):
        return source._datasets
    return [source._original_dataset]


def _all_frames() -> Iterator[types.FrameType]:
    """The frames of all threads; of this one those of its callers' callers.

    A frame that has itself in a variable is let go by the garbage collector
    only, and all of its callers with it.
    """
    innermost = sys._current_frames()
    innermost[threading.get_ident()] = sys._getframe(2)
    frames: list[types.FrameType | None] = [*innermost.values()]
    del innermost
    while frames:
        frame = frames.pop()
        while frame is not None:
            yield frame
            frame = frame.f_back


def is_running(epochs: EpochIterator) -> bool:
    """Whether the `fit` of an epoch iterator is on the stack of a thread."""
    return any(
        frame.f_code.co_name == "fit"
        and any(value is epochs for value in frame.f_locals.values())
        for frame in _all_frames()
    )


class _Watched:
    """Members of an epoch iterator whose class was taken over by `watch`."""

    watcher: Watcher

    def _get_iterator(self):
        self.watcher.iterator_made()
        return super()._get_iterator()

    def _enumerate_iterator(self):
        done = self.watcher.begin_epoch()
        for step, end, iterator in super()._enumerate_iterator():
            if step < done:
                self.watcher.skip(iterator)
                continue
            self.watcher.between_steps(step, iterator)
            yield step, end, iterator


def watch(epochs: EpochIterator, watcher: Watcher) -> None:
    """Puts a subclass in the place of the class of a `fit`'s epochs.

    It ends with `unwatch`, or with the object, which is that of one `fit`.
    """
    if not isinstance(epochs, _Watched):
        epochs.__class__ = taken_over(_Watched, type(epochs))
    epochs.watcher = watcher


def unwatch(epochs: EpochIterator) -> None:
    """Has the epochs of a `fit` that has ended let their watcher go.

    That one knows them: both were left to the garbage collector, with the
    threads of TensorFlow's iterator.
    """
    if hasattr(epochs, "watcher"):
        del epochs.watcher


@functools.cache
def _taken_over(mixin, base):
    return type(base.__name__, (mixin, base), {})


# A subclass with the members of a mixin, to be an object's class.
taken_over: Any = _taken_over


def make_iterator(epochs: EpochIterator) -> Iterator[Any]:
    """Makes an iterator as an epoch does, which moves seeds of shuffles on."""
    return iter(epochs._get_iterator())


def go_on_with(
    epochs: EpochIterator, iterator: Iterator[Any], steps_seen: int
) -> None:
    """Has an epoch of `steps_per_epoch` go on with an iterator in use."""
    epochs._current_iterator = iterator
    epochs._steps_seen = steps_seen


def known_batches(epochs: EpochIterator) -> int | None:
    """Batches of the data as far as Keras knows, which learns it by the end."""
    return epochs._num_batches


def set_known_batches(epochs: EpochIterator, count: int | None) -> None:
    """Tells it what an earlier process has learned."""
    epochs._num_batches = count


def source_of(epochs: EpochIterator) -> tf.data.Dataset | None:
    """The dataset that a user gave; of one that he distributed its source.

    None for arrays, a `PyDataset` or a generator.
    """
    dataset = _given_to(epochs)
    if hasattr(dataset, "given_dataset"):  # of our own strategy
        return dataset.given_dataset
    return getattr(dataset, "_original_dataset", dataset)


def _given_to(epochs) -> Any:
    return getattr(epochs.data_adapter, "_dataset", None)


def give_data(
    epochs: EpochIterator, callbacks: CallbackList, dataset: tf.data.Dataset
) -> None:
    """Has a `fit` go on with another dataset, before an epoch's first step."""
    begun = epochs._epoch_iterator
    type(epochs).__init__(
        epochs,
        distribute_strategy=epochs._distribute_strategy,
        x=dataset,
        steps_per_epoch=epochs.steps_per_epoch,
        steps_per_execution=epochs.steps_per_execution,
    )
    epochs._epoch_iterator = begun
    callbacks.set_params({**callbacks.params, "steps": epochs.num_batches})
    for callback in callbacks.callbacks:
        bar = getattr(callback, "progbar", None)
        if isinstance(bar, keras.utils.Progbar):
            bar.target = epochs.num_batches


def shuffles_arrays(epochs: EpochIterator) -> bool:
    """Whether a user gave arrays, which Keras shuffles for him."""
    return bool(getattr(epochs.data_adapter, "_shuffle", False))


def rows_of_arrays(epochs: EpochIterator) -> list[str]:
    """How arrays that a user gave are cut into batches, and put in order."""
    data = epochs.data_adapter
    if not hasattr(data, "_shuffle"):
        return []
    last = data.partial_batch_size or data.batch_size
    order = "shuffled" if shuffles_arrays(epochs) else "in order"
    return [f"of {data.batch_size} rows, the last {last}", order]


def element_spec_of(epochs: EpochIterator) -> Any:
    """What a replica gets of a step, as `tf.TypeSpec`s."""

    def of_one(spec):
        if isinstance(spec, PerReplicaSpec):
            return spec._value_specs[0]
        return spec

    spec = epochs._distributed_dataset.element_spec
    return tf.nest.map_structure(of_one, spec)


def validation_epochs(model: keras.Model) -> EpochIterator | None:
    """The epochs over the validation data of the `fit` that runs."""
    return getattr(model, "_eval_epoch_iterator", None)


def looks_at_data(model: keras.Model) -> bool:
    """Whether Keras draws a batch of a model's data before each validation.

    It makes an iterator for that, to build what is not built, if the model was
    made under a strategy. A `PipelineModel` knows when nothing is left.
    """
    method = type(model)._maybe_symbolic_build
    is_own = method is not keras.Model._maybe_symbolic_build
    return model._distribute_strategy is not None and not is_own


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Has the `fit` that begins start with an epoch; None: as it was called.

    Keras keeps it for all later calls of `fit`, so it is to be put back.
    """
    model._initial_epoch = epoch


def build(model: keras.Model, element_spec: Any) -> None:
    """Makes all variables of a compiled model, its metrics' among them."""
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=element_spec)


def count_time_from(
    callbacks: CallbackList, steps: int, seconds_per_step: float
) -> None:
    """Has the progress bar reckon with steps that were done before."""
    for callback in callbacks.callbacks:
        bar = getattr(callback, "progbar", None)
        if isinstance(bar, keras.utils.Progbar):
            before = max(steps - 1, 0) * seconds_per_step
            bar._time_after_first_step = bar._start - before
            bar._start -= steps * seconds_per_step
