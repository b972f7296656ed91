"""The steps of parameter servers, for `fit`, `evaluate` and `predict`."""

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
from tfscale.parameter_server.worker_dataset import WorkerIterator
from tfscale.parameter_server.worker_scope import WorkerScope


class ParameterServerTrainer(WrappedModel):
    """The steps of a `ParameterServerModel`, which Keras' loops call."""

    def __init__(self, model: keras.Model):
        super().__init__(model)
        # No list, because Keras would track the variables as the wrapper's.
        self._check_variables = functools.partial(
            checks.check_variables, model, model.weights
        )
        self.built = True
        self._metrics_are_checked = False
        self._steps = StepQueue(self.distribute_strategy)

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
                step(data)
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
