"""A Keras model whose steps run on workers that do not wait for each other."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import fitting
from tfscale.adapters.row_optimizer import adapt_row_optimizer
from tfscale.mesh.models.wrapped_model import WrappedModel
from tfscale.parameter_server import checks
from tfscale.parameter_server.step_queue import StepQueue
from tfscale.parameter_server.step_queue import explained
from tfscale.parameter_server.worker_dataset import PerWorkerDataset
from tfscale.parameter_server.worker_dataset import WorkerIterator
from tfscale.parameter_server.worker_scope import WorkerScope


# A saved instance loads as the plain model, see wrapped_model.py.
@keras.saving.register_keras_serializable(package="tfscale")
class ParameterServerModel(WrappedModel):
    """Trains a Keras model on the workers of a `ParameterServerStrategy`.

    `compile`, `fit`, `evaluate`, `predict` and the `*_on_batch` methods are
    those of Keras. The plain model is saved.

    `compile` is called in the strategy's scope, with an optimizer that was made
    there and is right where steps do not wait for each other: one that
    accumulates gradients, scales losses, or overwrites weights with averages in
    training is refused.

    `fit` takes a `tf.data.Dataset` without end, created after the strategy, and
    `steps_per_epoch`. Its batches are dealt out: of W workers each one makes
    all of them and trains on every W-th. Where that costs too much, pass a
    function from a `tf.distribute.InputContext` to the dataset of that worker,
    such as `lambda context: tfscale.data.pipeline(..., batch_size=W * 32,
    input_context=context).repeat()`, which gives each 32 rows.

    An epoch is over when all of its steps are: metrics and `iterations` count
    each step once, and callbacks of epochs see the variables at rest. Callbacks
    of batches are called as steps are handed out, up to eight for each worker
    ahead of those that are over, whose metrics they get, by their names, and
    nothing else that a step returns. `evaluate` and `predict` take any data;
    the chief reads it and hands each batch to a worker, and results are those
    of one device.

    With one worker the numbers are those of one device. With several, weights
    and slots are those of asynchronous training (see the strategy);
    moving statistics of `BatchNormalization` are those of the last worker to
    write, and workers may draw the same dropout masks for different batches.

    Training continues without a lost worker; another one runs its step again,
    which may then have changed the variables twice. A worker that comes back at
    the same address joins again, and begins its data again; several lost ones
    join once all are back. A parameter server that is lost ends the training
    with a `ConnectionError`.

    Args:
        model: A built Keras model of any kind, made in the scope of the
            strategy. A `train_step` or `test_step` of its own is called. If
            it is compiled, this is too.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If not in the scope of a `ParameterServerStrategy`, or if
            the model was made outside it or is not built.

    Example: in the chief of a cluster, see `docs/strategies.md`.

    >>> import keras
    >>> import tfscale
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> tfscale.ParameterServerModel(model)
    Traceback (most recent call last):
    ...
    ValueError: `ParameterServerModel` must be made in the scope of a...
    """

    def __init__(self, model: keras.Model):
        checks.check_strategy(tf.distribute.get_strategy())
        checks.check_model(model)
        super().__init__(model)
        # No list, because Keras would track the variables as the wrapper's.
        self._check_variables = functools.partial(
            checks.check_variables, model, model.weights
        )
        self.built = True
        self._steps = StepQueue(self.distribute_strategy)
        if model.compiled:
            self._compile_around()

    def _compile_in_scope(self, *, run_eagerly, jit_compile, **arguments):
        checks.check_steps(run_eagerly, jit_compile)
        self.model.compile(jit_compile=jit_compile, **arguments)
        self._compile_around()

    def _compile_around(self):
        self._metrics_are_checked = False
        model = self.model
        checks.check_optimizer(model)
        keras.Model.compile(
            self,
            optimizer=model.optimizer,
            steps_per_execution=model.steps_per_execution,
            jit_compile=False,
            auto_scale_loss=False,  # built already, if it can be
        )

    def fit(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """See `keras.Model.fit`, and the class for what it takes.

        Raises:
            ConnectionError: If a parameter server is lost.
            ValueError: If `x` is no dataset, ends, or was made before the
                strategy; if there is no `steps_per_epoch`.
        """
        checks.check_callbacks(kwargs.get("callbacks"))
        if callable(x) and not isinstance(x, tf.data.Dataset):
            checks.check_no_class_weight(kwargs.get("class_weight"))
            x = PerWorkerDataset(x, self.distribute_strategy.num_workers)
        checks.check_training_data(x, kwargs.get("steps_per_epoch"))
        kwargs.setdefault("shuffle", False)  # The dataset does that.
        with explained(self.distribute_strategy.cluster):  # callbacks too
            return super().fit(x, *args, **kwargs)

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Refused: workers run functions that know the float variables."""
        raise ValueError(
            "A model on parameter servers must be quantized before it is "
            f"wrapped. Received: `quantize` of a `{type(self).__name__}`. "
            "Quantize the plain model, and wrap it."
        )

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """See `keras.Model.predict`; several workers take part."""
        # The number of batches of one call of the function below.
        count = 2 * self.distribute_strategy.num_workers
        if steps:  # Keras would read more of them to fill the last call.
            count = max(n for n in range(1, count + 1) if steps % n == 0)
        before = self.steps_per_execution
        self.steps_per_execution = count
        try:
            return super().predict(x, batch_size, verbose, steps, callbacks)
        finally:
            self.steps_per_execution = before

    # --- the steps of `fit`, `evaluate` and `predict` ---------------------

    @property
    def metrics(self) -> list[keras.Metric]:
        """The metrics of the model inside."""
        return self.model.metrics

    def reset_metrics(self) -> None:
        """See `keras.Model`."""
        self._steps.reset()
        self.model.reset_metrics()

    def get_metrics_result(self) -> dict[str, Any]:
        """See `keras.Model`; waits for all steps that are under way."""
        self._steps.join()
        sums = self._steps.sums or []
        for variable, value in zip(self._metric_variables(), sums):
            variable.assign(value)
        return self.model.get_metrics_result()

    def train_step(self, data: Any) -> Any:
        """A step on a batch, that of the model inside; on a worker."""
        return self.model.train_step(data)

    def test_step(self, data: Any) -> Any:
        """A step on a batch, that of the model inside; on a worker."""
        return self.model.test_step(data)

    def predict_step(self, data: Any) -> Any:
        """The inner model's predictions for a batch; on a worker."""
        return self.model.predict_step(data)

    def make_train_function(self, force: bool = False) -> Any:
        """See `keras.Model`; the function hands a step to a worker."""
        self._check_variables()
        if self.optimizer is not None:
            adapt_row_optimizer(self.optimizer)
        if self.train_function is None or force:
            self.train_function = self._scheduling(self.train_step)
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """See `keras.Model`; the function hands a step to a worker."""
        self._check_variables()
        if self.test_function is None or force:
            self.test_function = self._scheduling(self.test_step)
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        """See `keras.Model`; the function hands batches to workers."""
        self._check_variables()
        if self.predict_function is not None and not force:
            return self.predict_function
        strategy = self.distribute_strategy

        @tf.function(reduce_retracing=True)
        def on_batch(batch):
            return strategy.run(self.predict_step, args=(batch,))

        def function(batches):
            outputs = self._steps.run(on_batch, list(batches))
            return tf.nest.map_structure(
                lambda *tensors: tf.concat(tensors, 0), *outputs
            )

        self.predict_function = function
        return function

    def _scheduling(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function that Keras calls for a step of `fit` or `evaluate`."""
        strategy = self.distribute_strategy
        metrics = self._metric_variables()
        counters = self._counters()

        def on_worker(data):
            with WorkerScope(metrics, counters) as scope:
                logs = step(data)
                results = self.model.get_metrics_result()
            checks.warn_of_unlogged(logs, results)
            return scope.finish()

        @tf.function
        def from_iterator(iterator):
            return strategy.run(on_worker, args=(next(iterator),))

        @tf.function(reduce_retracing=True)
        def on_batch(batch):
            return strategy.run(on_worker, args=(batch,))

        training = step == self.train_step

        def function(iterator):
            if training and isinstance(iterator, WorkerIterator):
                for _ in range(self.steps_per_execution):
                    self._steps.put(from_iterator, iterator.on_workers)
                return self._logs()
            self._steps.put(on_batch, next(iterator))
            for _ in range(self.steps_per_execution - 1):
                batch = next(iterator, None)
                if batch is None:
                    break
                self._steps.put(on_batch, batch)
            if not isinstance(iterator, WorkerIterator):
                self._steps.join()  # the batch of `train_on_batch`
            return self._logs()

        return function

    def _logs(self):
        state = zip(self._metric_variables(), self._steps.sums)
        with keras.StatelessScope(list(state)):
            return self.model.get_metrics_result()

    def _metric_variables(self):
        return [v for metric in self.metrics for v in metric.variables]

    def _counters(self):
        """Variables of integers, which steps count up."""
        of_metrics = {id(v) for v in self._metric_variables()}
        found = [*self.model.non_trainable_variables]
        if self.optimizer is not None:
            found += self.optimizer.variables
        return [
            v
            for v in found
            if id(v) not in of_metrics and v.dtype.startswith(("int", "uint"))
        ]

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """See `keras.Model`; without a batch, which is on a worker."""
        spec = data_batch
        if iterator is not None:
            spec = fitting.element_spec_of(iterator)
        with self.distribute_strategy.scope():
            if self.optimizer is not None and not self.optimizer.built:
                self.optimizer.build(self.model.trainable_variables)
        fitting.build(self.model, spec)
        if not self._metrics_are_checked:
            self.reset_metrics()
            checks.check_metrics(self.metrics)
            self._metrics_are_checked = True
