"""What is private in a `fit` that runs: its epochs, and where it stands.

Each name is listed in `keras_names`, with why.
"""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals.stack import calls
from tfscale._internals.stack import calls_of_all_threads
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


def running_fit(model: keras.Model) -> tuple[EpochIterator, CallbackList]:
    """The epochs and the callbacks of the `fit` of a model in this thread.

    They are local variables of `fit`: Keras gives callbacks no way to them.

    Raises:
        RuntimeError: If no `fit` of the model runs in this thread.
    """
    for call in calls():
        is_fit = call.purpose == "fit" and call.model is model
        if is_fit and isinstance(call.callbacks, CallbackList):
            return call.epochs, call.callbacks
    raise RuntimeError(
        "The callback works in `fit` of its model. Received: `on_train_begin` "
        "outside of it. In a loop of your own use `tf.train.Checkpoint`."
    )


def probing_model() -> keras.Model | None:
    """The model for which Keras draws a batch only to see what it is like."""
    models = (call.model for call in calls() if call.purpose == "probe")
    return next(models, None)


def data_keras_reads() -> list[tuple[str, list[tf.data.Dataset]]]:
    """What Keras reads datasets for, and which; the innermost of calls first.

    It is "fit", "evaluate", "predict", or "probe" at a batch.
    """
    return [
        (call.purpose, _datasets_of(_given_to(call.epochs)))
        for call in calls_of_all_threads()
        if call.purpose != "create" and call.epochs is not None
    ]


def reader_of(distributed: Any) -> tuple[str, EpochIterator] | None:
    """What Keras makes an iterator over a distributed dataset for, if it does.

    See `data_keras_reads`; and the epochs.
    """
    for purpose, _, epochs, _ in calls():
        is_read = purpose != "create" and epochs is not None
        if is_read and epochs._distributed_dataset is distributed:
            return purpose, epochs
    return None


def _datasets_of(source):
    if not isinstance(source, tf.distribute.DistributedDataset):
        return [source] if isinstance(source, tf.data.Dataset) else []
    # Of a function, or else of a dataset.
    if hasattr(source, "_datasets"):
        return source._datasets
    return [source._original_dataset]


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


def probes_data(model: keras.Model) -> bool:
    """Whether Keras draws a batch of a model's data before each validation.

    It makes an iterator for that, to build what is not built, if the model was
    made under a strategy. A `PipelineModel` knows when nothing is left.
    """
    method = model.__class__._maybe_symbolic_build
    is_overridden = method is not keras.Model._maybe_symbolic_build
    return model._distribute_strategy is not None and not is_overridden


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
