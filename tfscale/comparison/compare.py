"""`tfscale.compare`: does a model train as on one device, and if not, why?"""

import contextlib
import itertools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.comparison.facts import facts_of
from tfscale.comparison.report import Comparison
from tfscale.comparison.training import Training
from tfscale.integers import check_integer


def compare(
    build_model: Callable[[], keras.Model],
    dataset: Iterable[Any],
    strategy: tf.distribute.Strategy,
    steps: int = 3,
    wrap: Callable[[keras.Model], keras.Model] | None = None,
    *,
    dtype: str | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> Comparison:
    """Trains a model on one device and under a strategy, and compares.

    Both start from the same weights and see the same batches. `evaluate` and
    `predict` run before the training, so that what differs there has its cause
    in a loss, a metric or a layer, and not in other weights. On one device
    gradients of lookups are made dense first, which Keras' optimizers need
    (docs/optimizers.md). Products on GPUs are in full float32, without TF32.

    Layers that draw random numbers draw none, if they have a seed generator and
    an attribute `rate`, `stddev`, `dropout` or `recurrent_dropout`, as those of
    Keras do. Others are named in the report: let them take random numbers from
    the dataset.

    Call it outside of the strategy's scope. Both models are kept, and the
    weights of each step of the first: compare a large model at a smaller width.

    Args:
        build_model: A function of no arguments that returns a compiled model,
            the same one each time. It is called on one device and in the
            strategy's scope.
        dataset: Batches as `fit` takes them, `(x, y)` for instance: a
            `tf.data.Dataset`, data of `tfscale.data.pipeline`, or any other
            iterable. The first `steps` of them are used.
        strategy: A `tfscale.MeshStrategy`, or another strategy of
            `tf.distribute`.
        steps: The number of optimizer steps.
        wrap: Called in the scope with the compiled model; returns the model to
            train, as `lambda m: tfscale.PipelineModel(m, 4)` does.
        dtype: `"float64"` builds both models with Keras' global dtype policy
            of this name. Remaining differences are then no rounding. By default
            the models are compared as they are.
        callbacks: Callbacks of the `fit` under the strategy, such as a
            `tfscale.callbacks.GradientAccumulation`.

    Returns:
        A `Comparison`, with `table()` for people and `check(rtol)` for tests.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: Before any training, if the model is not compiled, does not
            take what the dataset has, is built with other weights the second
            time or does not fit one device; if the dataset has fewer than
            `steps` batches; or if the strategy refuses the model.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tfscale
    >>> tfscale.use_virtual_devices(8)
    >>> def build_model():
    ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    ...     return model
    >>> x, y = np.random.rand(24, 8), np.random.rand(24, 1)
    >>> dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    >>> strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=2))
    >>> tfscale.compare(build_model, dataset, strategy).check()
    """
    _check(build_model, strategy, steps)
    data = _first_batches(dataset, steps)
    with _settings(dtype):
        expected = Training(build_model, data)
        skipped = _evaluated(expected)
        found = Training(build_model, data, strategy, wrap)
        _check_same(expected.initial, found.initial)
        for phase in ("evaluate", "predict"):
            if phase not in skipped:
                getattr(found, phase)()
        _trained(expected)
        found.fit(callbacks)
    return Comparison(expected, found, facts_of(found), skipped)


def _check(build_model, strategy, steps):
    if not callable(build_model) or isinstance(build_model, keras.Layer):
        raise TypeError(
            "`build_model` must be a function of no arguments that returns a "
            f"compiled model. Received: {build_model!r}."
        )
    if not isinstance(strategy, tf.distribute.Strategy):
        raise TypeError(
            "`strategy` must be a `tf.distribute.Strategy`, such as a "
            f"`tfscale.MeshStrategy`. Received: {strategy!r}."
        )
    if tf.distribute.has_strategy():
        raise ValueError(
            "`compare` must be called outside of a strategy's scope, because "
            "it trains on one device too. Received: a call within "
            f"`{tf.distribute.get_strategy()!r}`."
        )
    check_integer("steps", steps)


def _first_batches(dataset, steps):
    """The batches, each drawn once: both sides have the same."""
    if isinstance(dataset, keras.utils.PyDataset):
        count = dataset.num_batches
        count = steps if count is None else min(steps, count)
        batches = [dataset[index] for index in range(count)]
    else:
        batches = [batch for _, batch in zip(range(steps), dataset)]
    if len(batches) < steps:
        raise ValueError(
            "`dataset` must have a batch for each step. Received: "
            f"{len(batches)} batches and steps={steps}. Repeat the data, or "
            "compare fewer steps."
        )
    data = tf.data.Dataset.from_tensors(batches[0])
    for batch in batches[1:]:
        data = data.concatenate(tf.data.Dataset.from_tensors(batch))
    return data


def _evaluated(training):
    """Evaluates and predicts; what a model cannot do, and why."""
    skipped: dict[str, str] = {}
    for phase in ("evaluate", "predict"):
        try:
            getattr(training, phase)()
        except Exception as error:
            if attributes.is_step_of_keras(training.inner.train_step):
                raise _failed(training, phase, error) from error
            why = f"{type(error).__name__}: {error}"
            skipped[phase] = why.partition("\n")[0]
    return skipped


def _trained(training):
    """Trains on one device."""
    try:
        training.fit()
    except Exception as error:
        if any(key.phase == "fit" for key in training.numbers):
            raise
        raise _failed(training, "fit", error) from error


def _failed(training, phase, error):
    return ValueError(
        "The model must take what `dataset` has. Received: "
        f"{training.inner.name!r}, whose `{phase}` fails on one device, with "
        f"the first batch: {type(error).__name__}: {error}"
    )


def _check_same(expected, found):
    pairs = [
        (ours, theirs)
        for ours, theirs in itertools.zip_longest(
            expected.items(), found.items(), fillvalue=("nothing", None)
        )
        if not np.array_equal(ours[1], theirs[1], equal_nan=True)
    ]
    if not pairs:
        return
    (path, value), (other, again) = pairs[0]
    raise ValueError(
        "`build_model` must build the same model each time, with the same "
        "initial weights after `keras.utils.set_random_seed`. Received: on "
        f"one device {path!r} of shape {np.shape(value)}, and then {other!r} "
        f"of shape {np.shape(again)}, with different values. Remove whatever "
        "depends on the time, a counter or an earlier call."
    )


@contextlib.contextmanager
def _settings(dtype: str | None) -> Iterator[None]:
    """Within it, Keras' global dtype is this one, and products are exact."""
    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    config = tf.config.experimental
    has_tf32 = config.tensor_float_32_execution_enabled()
    config.enable_tensor_float_32_execution(False)
    if dtype is not None:
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        config.enable_tensor_float_32_execution(has_tf32)
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
