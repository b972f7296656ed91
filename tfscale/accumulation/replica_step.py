"""A step of microbatches, for one replica or model rank.

Before the loop the whole `train_step` runs once where no variable changes:

    trial on the whole batch: the divisors of losses, the gradients, the layers
    that note moments. Only the divisors are
            used, so TensorFlow prunes all that they do not need.
    loop    on each microbatch: the sums below
    end     one update

A microbatch counts by its rows in those of all replicas (step/batch_shard.py),
and each loss that is given to `compile` by its divisor.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.accumulation import checks
from tfscale.accumulation.gradient_capture import GradientCapture
from tfscale.context import step_context
from tfscale.graphs.noting_scope import NotingScope
from tfscale.mesh.gradient_noise import GradientNoise
from tfscale.mesh.gradient_noise import squared_norms
from tfscale.step import batch_norm
from tfscale.step import losses
from tfscale.step.batch_shard import BatchShard
from tfscale.step.batch_shard import times
from tfscale.step.microbatches import Microbatches
from tfscale.variables.of_variable import is_overwritten
from tfscale.variables.of_variable import sharding_of


class ReplicaStep:
    """A step of a replica; created in its thread, in replica context.

    Attributes:
        batch: The data.
        most_rows: Rows of the largest replica, a scalar of int32; the same on
            all replicas of all workers.
        initial: The sums before the first microbatch, a flat list of tensors.
        sums: The sums after the last microbatch; set by the loop.
    """

    def __init__(
        self,
        model: keras.Model,
        train_step: Callable[[Any], Any],
        data: Any,
        num_microbatches: int,
        noise: GradientNoise | None,
    ):
        self._replicas = step_context.num_replicas()
        # Several replicas have different, unknown numbers of rows.
        is_compiled = model.jit_compile and self._replicas == 1
        self.batch = Microbatches(data, num_microbatches, is_compiled)
        self.sums: list[tf.Tensor] = []
        self._model = model
        self._train_step = train_step
        self._rows = tf.cast(self.batch.num_rows, losses.precision())
        self._noise = noise if self._replicas == 1 else None
        self._try(data)

    def _try(self, data):
        found = []

        def record(tensor):
            found.append(tensor)
            return tensor

        with NotingScope(collect_losses=True) as scope:
            try:
                logs, capture, noted = self._run(data, record)
            except Exception:
                # Weights that a layer assigned to are no longer variables here:
                # perhaps the reason of the error.
                checks.check_updates(self._model, scope.changed)
                raise
            by_name = _results_by_name(self._model, scope)
            by_id = {id(value): source for value, *source in capture.results}
            self._sources = [
                by_id.get(id(value), by_name.get(name))
                for name, value in _flat(logs)
            ]
        capture.check()
        checks.check_updates(self._model, scope.changed)
        *self._totals, rows = _sums_at_once(
            [*found, batch_norm.in_its_row(self._rows)]
        )
        self.most_rows = tf.cast(tf.reduce_max(rows), tf.int32)
        self._all_rows = tf.reduce_sum(rows)
        self._variables = capture.variables
        self._are_paired = capture.are_paired
        self._dtypes = [
            None if g is None else g.dtype for g in capture.gradients
        ]
        self._averages = [averages for averages, _ in noted.calls]
        self._logs = logs
        self.initial = [
            tf.zeros(_known_shape(g, capture.variables, i), _sum_dtype(g.dtype))
            for i, g in enumerate(capture.gradients)
            if g is not None
        ]
        self._num_gradients = len(self.initial)
        self.initial += [tf.zeros_like(moments) for _, moments in noted.calls]
        if self._noise is not None:
            # Squared norms; q and r: see `GradientNoise`.
            self.initial += [tf.zeros(self._num_gradients), tf.zeros(2)]
        self._num_sums = len(self.initial)
        self.initial += [
            tf.zeros([dim or 0 for dim in x.shape], x.dtype)
            for x in _tensors(logs)
        ]

    @property
    def shapes(self) -> list[tf.TensorShape]:
        """The shapes of the sums."""
        known = [x.shape for x in self.initial[: self._num_sums]]
        return known + [x.shape for x in _tensors(self._logs)]

    def microbatch(
        self,
        index: tf.Tensor,
        count: tf.Tensor,
        more_rows: int | None,
        sums: list[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Runs one microbatch; adds its results to `sums`.

        See `Microbatches.microbatch` for the other arguments.
        """
        data = self.batch.microbatch(index, count, more_rows)
        totals = iter(self._totals)

        def next_total(tensor):
            found = next(totals, None)
            if found is None or found.shape.rank != tensor.shape.rank:
                # A StopIteration would be the end of the data to Keras.
                raise ValueError(
                    "`train_step` must be the same in every trace, because "
                    "microbatches share one exchange between replicas. "
                    f"Received: a step of {self._model.name!r} that made more "
                    "losses than in its first trace. Remove whatever depends "
                    "on Python's state, like a counter."
                )
            return found

        weight = tf.math.divide_no_nan(losses.num_rows(data), self._rows)
        logs, capture, noted = self._run(data, next_total)
        before = iter(sums)
        found = []
        variables = self._variables or attributes.optimized_variables(
            self._model.optimizer
        )
        for g, variable in zip(capture.gradients, variables):
            if g is None:
                continue
            total = next(before)
            g = tf.cast(g, total.dtype)
            if is_overwritten(variable):
                found.append(tf.maximum(total, g))
            else:
                found.append(total + times(g, capture.weight))
        for _, moments in noted.calls:
            both = tf.stack([next(before), moments])
            found.append(batch_norm.combined(both))
        if self._noise is not None:
            microbatch_gradients = [
                times(g, capture.weight)
                for g in capture.gradients
                if g is not None
            ]
            found.append(next(before) + squared_norms(microbatch_gradients))
            rows = tf.maximum(losses.num_rows(data), 1.0)
            found.append(next(before) + tf.stack([1.0, 1.0 / rows]) * weight**2)
        for source, value in zip(self._sources, _tensors(logs)):
            old = next(before)
            if source is None and value.dtype.is_floating:
                value = old + times(value, weight)
            found.append(value)
        return found

    def end(self, noting: batch_norm.NotedMoments) -> Any:
        """Updates the variables by the sums; returns the logs.

        The moments of layers are given to `noting`, which updates averages.
        """
        sums = iter(self.sums)
        gradients = [
            None if dtype is None else tf.cast(next(sums), dtype)
            for dtype in self._dtypes
        ]
        noting.calls += [(averages, next(sums)) for averages in self._averages]
        if self._noise is not None:
            squares, shares = next(sums), next(sums)
            variables = self._variables or self._model.trainable_variables
            self._noise.of_microbatches(
                squares, gradients, variables, *tf.unstack(shares)
            )
        optimizer = self._model.optimizer
        if self._are_paired:
            optimizer.apply_gradients(zip(gradients, self._variables))
        else:
            optimizer.apply(gradients, self._variables)
        logs = list(sums)
        if self._replicas > 1:
            # Keras takes the mean over replicas.
            share = tf.math.divide_no_nan(self._rows, self._all_rows)
            logs = [
                times(value, share * self._replicas)
                if value.dtype.is_floating
                else value
                for value in logs
            ]
            # The sources of all replicas.
            sources = list(filter(None, self._sources))
            results = {
                metric: keras.tree.flatten(metric.result())
                for metric in dict.fromkeys(metric for metric, _ in sources)
            }
            logs = [
                value if source is None else results[source[0]][source[1]]
                for source, value in zip(self._sources, logs)
            ]
        return keras.tree.pack_sequence_as(self._logs, logs)

    def _run(self, data, total):
        batch_shard = BatchShard(
            losses.num_rows(data),
            total,
            self._replicas,
            attributes.flatten_layers(self._model),
            weighs_loss=attributes.is_step_of_keras(self._train_step),
        )
        capture = GradientCapture(self._model.optimizer, batch_shard)
        noted = batch_norm.NotedMoments()
        with step_context.within(
            batch_shard=batch_shard,
            moments=noted,
            gradient_capture=capture,
        ):
            logs = self._train_step(data)
        return logs, capture, noted


def _sums_at_once(tensors):
    """Sums over the replicas, of all tensors together."""
    if step_context.num_replicas() == 1:
        return tensors
    flat = tf.concat([tf.reshape(x, [-1]) for x in tensors], axis=0)
    (flat,) = batch_norm.sum_over_replicas([flat])
    sizes = [x.shape.num_elements() for x in tensors]
    sums = zip(tf.split(flat, sizes), tensors)
    return [tf.reshape(vector, x.shape) for vector, x in sums]


def _results_by_name(model, scope):
    """Metrics that were updated, and the index of a result, by its name."""
    found = {}
    for metric in model.metrics:
        if any(id(v) in scope.state_mapping for v in metric.variables):
            results = _flat(metric.result())
            found |= {
                name or metric.name: (metric, i)
                for i, (name, _) in enumerate(results)
            }
    return found


def _flat(logs):
    """The numbers in logs, in Keras' order, and the names of a dict's."""
    return [
        (path[0] if path else None, value)
        for path, value in keras.tree.flatten_with_path(logs)
    ]


def _tensors(logs):
    return [tf.convert_to_tensor(value) for _, value in _flat(logs)]


def _sum_dtype(dtype):
    half = (tf.float16, tf.bfloat16)
    return tf.float32 if dtype in half else dtype


def _known_shape(gradient, variables, index):
    if gradient.shape.is_fully_defined() or variables is None:
        return gradient.shape
    # The shape of this rank's shard.
    return tf.TensorShape(sharding_of(variables[index]).local_shape)
