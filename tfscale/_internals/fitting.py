"""Private state of a `fit` that runs: its epochs and its progress.

Each name is listed in `keras_names`, with why.
"""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import datasets
from tfscale._internals.stack import Call
from tfscale._internals.stack import calls
from tfscale._internals.symbols import TFEpochIterator

# Private state that callbacks of Keras keep for later steps.
MODEL_CHECKPOINT_COUNTERS = (
    "_batches_seen_since_last_saving",
    "_last_batch_seen",
)
SWAP_EMA_STATE = ("_ema_weights_in_model",)
TENSORBOARD_STEPS = ("_global_train_batch", "_global_test_batch")


def running_fit(
    model: keras.Model,
) -> tuple[TFEpochIterator, keras.callbacks.CallbackList]:
    """The epochs and the callbacks of the `fit` of a model in this thread.

    They are local variables of `fit`, which callbacks cannot reach otherwise.
    """
    for call in _running_fits():
        is_of_model = call.model is model
        if is_of_model and isinstance(
            call.callbacks, keras.callbacks.CallbackList
        ):
            return call.epochs, call.callbacks
    raise RuntimeError(
        "The callback works in `fit` of its model. Received: `on_train_begin` "
        "outside of it. In a loop of your own use `tf.train.Checkpoint`."
    )


def is_running(epochs: TFEpochIterator, thread: int) -> bool:
    """Whether the `fit` of some epochs runs in a thread.

    Keras does not tell callbacks of exceptions.
    """
    return any(call.epochs is epochs for call in _running_fits(thread))


def is_to_profile(tensorboard: keras.callbacks.TensorBoard) -> bool:
    """Whether TensorFlow's profiler runs at some of its steps."""
    return tensorboard._should_trace


def _running_fits(thread: int | None = None) -> list[Call]:
    return [call for call in calls(thread) if call.purpose == "fit"]


def keras_call(thread: int | None = None) -> Call | None:
    """The innermost call of Keras in a thread, this one if not another."""
    return next(iter(calls(thread)), None)


def is_read_by(distributed: Any, call: Call | None) -> bool:
    """Whether a call of Keras iterates over a distributed dataset."""
    if call is None or call.stage == "create" or call.epochs is None:
        return False
    return call.epochs._distributed_dataset is distributed


def callbacks_of(call: Call) -> list[Any]:
    """The callbacks of a call, also before Keras has made them a list."""
    given = call.callbacks
    given = getattr(given, "callbacks", given) or []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def make_iterator(epochs: TFEpochIterator) -> Iterator[Any]:
    """Creates an iterator as an epoch does, with new seeds of shuffles."""
    return iter(epochs._get_iterator())


def go_on_with(
    epochs: TFEpochIterator, iterator: Iterator[Any] | None, steps_seen: int
) -> None:
    """Continues an epoch of `steps_per_epoch`; None is a new iterator."""
    epochs._current_iterator = iterator
    epochs._steps_seen = steps_seen


def steps_begun(epochs: TFEpochIterator) -> int:
    """Batches of the current iterator whose steps have begun."""
    return epochs._steps_seen


def known_batches(epochs: TFEpochIterator) -> int | None:
    """Batches of the data, None until Keras has reached its end."""
    return epochs._num_batches


def set_known_batches(epochs: TFEpochIterator, count: int | None) -> None:
    epochs._num_batches = count


def source_of(epochs: TFEpochIterator) -> tf.data.Dataset | None:
    """The dataset that a user gave, or the source of a distributed one.

    None for arrays, a `PyDataset` or a generator.
    """
    dataset = _given_to(epochs)
    if hasattr(dataset, "given_dataset"):  # of our own strategy
        return dataset.given_dataset
    return getattr(dataset, "_original_dataset", dataset)


def _given_to(epochs) -> Any:
    return getattr(epochs.data_adapter, "_dataset", None)


def give_data(
    epochs: TFEpochIterator,
    callbacks: keras.callbacks.CallbackList,
    dataset: tf.data.Dataset,
) -> None:
    """Continues a `fit` with another dataset, before an epoch's first step."""
    other = epochs.__class__(
        distribute_strategy=callbacks.callbacks[0].model.distribute_strategy,
        x=dataset,
        steps_per_epoch=epochs.steps_per_epoch,
        steps_per_execution=epochs.steps_per_execution,
    )
    epochs.data_adapter = other.data_adapter
    set_distributed_data(epochs, distributed_data(other))
    set_known_batches(epochs, known_batches(other))
    go_on_with(epochs, None, 0)
    callbacks.set_params({**callbacks.params, "steps": epochs.num_batches})
    for callback in callbacks.callbacks:
        bar = getattr(callback, "progbar", None)
        if isinstance(bar, keras.utils.Progbar):
            bar.target = epochs.num_batches


def is_of_python(epochs: TFEpochIterator) -> bool:
    """Whether Python makes the batches: no arrays, and no dataset."""
    is_of_arrays = hasattr(epochs.data_adapter, "_shuffle")
    return not is_of_arrays and _given_to(epochs) is None


def shuffles_arrays(epochs: TFEpochIterator) -> bool:
    return bool(getattr(epochs.data_adapter, "_shuffle", False))


def rows_of_arrays(epochs: TFEpochIterator) -> list[str]:
    """How arrays are cut into batches, and ordered."""
    data = epochs.data_adapter
    if not hasattr(data, "_shuffle"):
        return []
    last = data.partial_batch_size or data.batch_size
    order = "shuffled" if shuffles_arrays(epochs) else "in order"
    return [f"of {data.batch_size} rows, the last {last}", order]


def element_spec_of(epochs: TFEpochIterator) -> Any:
    """The data of a replica in a step, as `tf.TypeSpec`s."""
    spec = tf.nest.map_structure(
        lambda spec: getattr(spec, "_value_specs", [spec])[0],
        distributed_data(epochs).element_spec,
    )
    return datasets.spec_of_batch(spec)


def distributed_data(epochs: TFEpochIterator) -> Any:
    """The dataset that Keras iterates over in each epoch."""
    return epochs._distributed_dataset


def source_of_distributed(distributed: Any) -> tf.data.Dataset | None:
    """The dataset that TensorFlow has distributed, None if it was another way.

    Parameter servers distribute it otherwise, and functions make one for each
    worker.
    """
    return getattr(distributed, "_original_dataset", None)


def set_distributed_data(epochs: TFEpochIterator, dataset: Any) -> None:
    """Has the iterators of later epochs be of another dataset."""
    epochs._distributed_dataset = dataset


def validation_epochs(model: keras.Model) -> TFEpochIterator | None:
    """The epochs over the validation data, while a `fit` evaluates a model."""
    found = calls()[:2]
    if [call.purpose for call in found] != ["evaluate", "fit"]:
        return None
    return found[0].epochs if found[0].model is model else None


def probes_data(model: keras.Model, epochs: TFEpochIterator) -> bool:
    """Whether Keras draws a batch of the data of epochs before these begin.

    It creates an iterator for that, to build layers, if the model was created
    under a strategy. A `PipelineModel` knows when all are built.
    """
    method = model.__class__._maybe_symbolic_build
    is_overridden = method is not keras.Model._maybe_symbolic_build
    with model.distribute_strategy.scope():
        has_strategy = tf.distribute.has_strategy()
    return has_strategy and is_probed(epochs) and not is_overridden


def is_probed(epochs: TFEpochIterator) -> bool:
    """Whether Keras may draw a batch of epochs, only to look at it."""
    return getattr(epochs._distributed_dataset, "is_probed", True)


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Sets the first epoch of the `fit` that begins; None: its argument.

    Keras keeps it for all later calls of `fit`, so it has to be reset.
    """
    model._initial_epoch = epoch


def build(model: keras.Model, element_spec: Any) -> None:
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=element_spec)
