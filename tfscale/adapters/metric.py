"""A metric of a batch in parts: on replicas, and in microbatches."""

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import in_place
from tfscale._internals import layers
from tfscale._internals import symbols
from tfscale.adapters.model import StagedModel
from tfscale.context import step_context


class MeshMetric(in_place.Mixin):
    """A metric whose results are known as such among what a step returns."""

    def result(self):
        """See `keras.Metric.result`; in replica context of all replicas."""
        step = step_context.current()
        capture, shard = step.gradient_capture, step.batch_shard_in_graph
        if capture is None and shard is not None:
            return shard.metrics_of_all(super().result)
        result = super().result()
        if capture is not None:
            values = keras.tree.flatten(result)
            capture.results += [(x, self, i) for i, x in enumerate(values)]
        return result


class ReplicatedMetric(in_place.Mixin):
    """A custom metric of parts of a batch, which may have no row."""

    def update_state(self, *args, **kwargs):
        """See `keras.Metric.update_state`; of no rows nothing is kept."""
        shard = step_context.current().batch_shard_in_graph
        if shard is None:
            return super().update_state(*args, **kwargs)
        before = [(v, tf.convert_to_tensor(v)) for v in self.variables]
        result = super().update_state(*args, **kwargs)
        for variable, value in before:
            # Without rows a mean is NaN, and a maximum infinite.
            new = tf.where(shard.rows > 0, variable, value)
            variable.assign(new)
        return result


class MeanMetric(in_place.Mixin):
    """A `keras.metrics.Mean`: a single number counts by the rows it is of.

    On one device it is of the whole batch, and counts as one.
    """

    def update_state(self, values, sample_weight=None):
        """See `keras.metrics.Mean.update_state`."""
        shard = step_context.current().batch_shard_in_graph
        if shard is not None and sample_weight is None:
            values, sample_weight = _by_rows(self, shard, values)
        return super().update_state(values, sample_weight)


class FunctionMetric(in_place.Mixin):
    """A function as a metric, which Keras averages over calls.

    A number for each row or element counts as one, if no mask leaves it out,
    and a single number as in `MeanMetric`, or the mean of one for each class.
    """

    def update_state(self, y_true, y_pred, sample_weight=None):
        """See `keras.Metric.update_state`."""
        shard = step_context.current().batch_shard_in_graph
        if shard is None or sample_weight is not None:
            return super().update_state(y_true, y_pred, sample_weight)
        function = attributes.metric_function(self)
        values = function(y_true, y_pred)
        is_by_class = _is_by_class(function, values, (y_true, y_pred))
        if is_by_class:
            values = tf.reduce_mean(tf.cast(values, self.dtype))
        values, sample_weight = _by_rows(self, shard, values)
        if sample_weight is None:
            mask = symbols.get_keras_mask(y_pred)
            sample_weight = None if mask is None else tf.cast(mask, self.dtype)
        return keras.metrics.Mean.update_state(self, values, sample_weight)


def _by_rows(metric, shard, values):
    """The values for a mean, and the weight of a single one."""
    values = tf.cast(values, metric.dtype)
    if values.shape.rank != 0:
        return values, None
    share = tf.cast(shard.share, metric.dtype)
    # A replica without rows has no number.
    return tf.where(share > 0, values, 0), share


def _is_by_class(function, values, data):
    """Whether there are as many numbers whatever the number of rows is."""
    tensors = [x for x in keras.tree.flatten(data) if tf.is_tensor(x)]
    if not tensors or any(not x.shape.rank for x in tensors):
        return False
    shape = tf.convert_to_tensor(values).shape
    if not shape.rank or shape[0] is None:
        return False
    rows = [x.shape[0] for x in tensors]
    if all(not n or shape[0] % n for n in rows):
        return True
    # As many as rows or elements by chance: the shape of open rows tells.
    opened = keras.tree.map_structure(_with_open_rows, data)
    try:
        traced = tf.function(function, autograph=False)
        shape = traced.get_concrete_function(*opened).output_shapes
    except Exception:  # Written for rows that are known: those are counted.
        return False
    return shape.rank is not None and shape[0] is not None


def _with_open_rows(x):
    if not tf.is_tensor(x):
        return x
    return tf.TensorSpec([None, *x.shape[1:]], x.dtype)


def adapt_metrics(model: keras.Model) -> None:
    """Has metrics tell a step their results, and be updated by parts of it."""
    for metric in model.metrics:
        in_place.put(metric, MeshMetric)
    metrics = model.metrics
    if isinstance(model, StagedModel):
        # A pipeline gives the means of its losses the weights of losses.
        compile_loss = attributes.compile_loss_of(model)
        of_outputs = getattr(compile_loss, "metrics", ())
        trackers = [model.metrics[0], *of_outputs]
        metrics = [x for x in metrics if all(x is not y for y in trackers)]
    _adapt_updates(metrics)


def _adapt_updates(metrics):
    for metric in metrics:
        update_state = metric.__class__.update_state
        if update_state is keras.metrics.Mean.update_state:
            in_place.put(metric, MeanMetric)
        elif update_state is keras.metrics.MeanMetricWrapper.update_state:
            in_place.put(metric, FunctionMetric)
        elif not layers.is_of_keras(update_state):
            in_place.put(metric, ReplicatedMetric)
            continue
        # Metrics given to `compile` are inside one of Keras.
        _adapt_updates(getattr(metric, "metrics", ()))
