"""A metric that parts of a batch make wrong is refused or warned of by name.

A maximum, a last value and a moving average were added up over replicas: `fit`
and `evaluate` logged about twice the truth, without a word. So was a last value
of microbatches, and a function that returns one number was NaN where a replica
had no rows.
"""

import contextlib
import inspect
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import ops

import tfscale
from tests import same_numbers
from tfscale.step.checks import metric_trial
from tfscale.step.checks import trial

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(24, 4)).astype("float32")
Y = RANDOM.normal(size=(24, 3)).astype("float32")


class Own(keras.metrics.Metric):
    def __init__(self, aggregation="sum", dtype=None, start="zeros"):
        super().__init__(name="own")
        self.value = self.add_variable((), start, dtype, aggregation, "value")

    def result(self):
        return self.value


class Maximum(Own):
    def update_state(self, y, p, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(ops.abs(y - p))))


class GatheredMaximum(Own):
    def __init__(self):
        super().__init__("only_first_replica")

    def update_state(self, y, p, sample_weight=None):
        errors = ops.max(ops.abs(y - p), axis=-1)
        replica = tf.distribute.get_replica_context()
        if replica is not None:  # Keras tries it outside of any
            errors = replica.all_gather(errors, axis=0)
        self.value.assign(ops.maximum(self.value, ops.max(errors)))


class Minimum(Own):
    def reset_state(self):
        self.value.assign(1e9)

    def update_state(self, y, p, sample_weight=None):
        self.value.assign(ops.minimum(self.value, ops.min(p)))


class LastValue(Own):
    def update_state(self, y, p, sample_weight=None):
        self.value.assign(ops.mean(ops.abs(y - p)))


class MovingAverage(Own):
    def update_state(self, y, p, sample_weight=None):
        self.value.assign(0.99 * self.value + 0.01 * ops.mean(p))


class MeanOfLasts(LastValue):
    def __init__(self):
        super().__init__("mean")


class OwnMean(Own):
    """Two sums, one of them of integers, and a mean of Keras inside."""

    def __init__(self):
        super().__init__()
        self.count = self.add_variable((), "zeros", "int32", name="count")
        self.inner = keras.metrics.Mean()

    def update_state(self, y, p, sample_weight=None):
        errors = ops.mean(ops.square(y - p), axis=-1)
        self.value.assign(self.value + ops.sum(errors))
        self.count.assign_add(ops.shape(y)[0])
        self.inner.update_state(errors)

    def result(self):
        mean = self.value / ops.cast(self.count, "float32")
        return {"own": mean, "inner": self.inner.result()}


class OwnUpdateOfMean(keras.metrics.Mean):
    def update_state(self, y, p, sample_weight=None):
        super().update_state(ops.max(ops.abs(y - p), axis=-1), sample_weight)


class MeanOfMaxima(Own):
    """Adds up, and looks at several rows."""

    def __init__(self):
        super().__init__()
        self.calls = self.add_variable((), "zeros", name="calls")

    def update_state(self, y, p, sample_weight=None):
        self.value.assign_add(ops.max(ops.abs(y - p)))
        self.calls.assign_add(1.0)

    def result(self):
        return self.value / self.calls


class CountOfUpdates(Own):
    def update_state(self, y, p, sample_weight=None):
        self.value.assign_add(1.0)


def mean_error(y, p):
    return ops.mean(ops.abs(y - p))


def max_error(y, p):
    return ops.max(ops.abs(y - p))


def error_of_rows(y, p):
    return ops.mean(ops.abs(y - p), axis=-1)


class Undecided(Own):
    def update_state(self, y, p, sample_weight=None):
        self.value.assign_add(tf.random.uniform(()))


def history(
    metric,
    wrap=lambda model: model,
    rows=24,
    microbatches=1,
    how=None,
    eagerly=False,
    **axes,
):
    """What `fit` and `evaluate` log of a metric."""
    same_numbers.reset()
    with tfscale.MeshStrategy(tfscale.device_mesh(**axes)).scope():
        layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
        model = wrap(keras.Sequential([keras.Input((4,)), *layers]))
        is_class = isinstance(metric, type)
        metrics = [metric() if is_class else metric]
        how = how or {"metrics": metrics}
        model.compile("sgd", "mse", run_eagerly=eagerly, **how)
    fit = model.fit(
        *(X[:rows], Y[:rows]),
        batch_size=8,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[tfscale.callbacks.GradientAccumulation(microbatches)],
    )
    tested = model.evaluate(X, Y, 8, verbose=0, return_dict=True)
    logged = {**fit.history, **{f"test_{k}": v for k, v in tested.items()}}
    # The rows of a model differ between replicas: so do sums.
    return {k: v for k, v in logged.items() if "loss" not in k}


def pipeline(model):
    return tfscale.PipelineModel(model, 2)


class MetricsOfReplicasTest(parameterized.TestCase):
    @parameterized.parameters(Maximum, Minimum, LastValue, MovingAverage)
    @pytest.mark.crossing(every=4)
    def test_no_sum_is_refused_by_name(self, metric):
        for wrap in (lambda model: model, pipeline):
            with self.assertRaisesRegex(
                ValueError,
                f"(?s)'own', a {metric.__name__}, whose variable 'value' is no"
                ".*aggregation='mean'",
            ):
                history(metric, wrap, data=2)

    def test_one_replica_has_no_need_of_sums(self):
        expected = history(Maximum)
        found = history(Maximum, pipeline, pipeline=2)
        for name, value in expected.items():
            same_numbers.assert_close(found[name], value, name)

    @parameterized.product(
        metric=(OwnMean, OwnUpdateOfMean, GatheredMaximum),
        wrap=(lambda model: model, pipeline),
    )
    @pytest.mark.crossing(every=6)
    def test_what_adds_up_or_gathers_is_that_of_one_device(self, metric, wrap):
        expected = history(metric, eagerly=True)
        found = history(metric, wrap, data=2)
        self.assertEqual(set(found), set(expected))
        for name, value in expected.items():
            same_numbers.assert_close(found[name], value, name)

    def test_a_mean_over_replicas_may_be_asked_for(self):
        expected = history(MeanOfLasts, eagerly=True)
        for name, value in history(MeanOfLasts, data=2).items():
            same_numbers.assert_close(value, expected[name], name)

    def test_what_cannot_be_tried_is_warned_of(self):
        with self.assertWarnsRegex(UserWarning, "'own', a Undecided, which c"):
            history(Undecided, data=2)


class MetricsOfPartsTest(parameterized.TestCase):
    """Replicas and microbatches: the result of the whole batch, or words."""

    def said(self, metric, **options):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = history(metric, **options)
        said = [str(w.message) for w in said if w.category is UserWarning]
        return found, [text for text in said if "each part of a" in text]

    @parameterized.parameters(
        (LastValue, dict(microbatches=4)),
        (MovingAverage, dict(microbatches=4)),
        (CountOfUpdates, dict(microbatches=2)),
        (CountOfUpdates, dict(data=2)),
        (MeanOfMaxima, dict(data=2)),
        (MeanOfMaxima, dict(microbatches=2)),
        (MeanOfMaxima, dict(data=2, pipeline=2, wrap=pipeline)),
        (max_error, dict(data=2)),
        (max_error, dict(microbatches=2)),
        (max_error, dict(data=2, microbatches=2)),
    )
    @pytest.mark.crossing(every=12)
    def test_it_is_warned_of_once_and_by_name(self, metric, options):
        _, said = self.said(metric, **options)
        self.assertLen(said, 1)
        name = "own" if isinstance(metric, type) else metric.__name__
        self.assertIn(f"Received: {name!r}, a ", said[0])
        self.assertIn("last value", said[0])

    @pytest.mark.crossing
    def test_weighted_metrics_and_steps_of_several_batches_are_tried(self):
        for how in (
            dict(weighted_metrics=[LastValue()]),
            dict(metrics=[LastValue()], steps_per_execution=2),
        ):
            _, said = self.said(None, microbatches=2, how=how)
            self.assertLen(said, 1)

    @parameterized.parameters(
        *(
            (metric, options)
            for metric in (mean_error, error_of_rows)
            for options in (
                dict(data=2),
                dict(data=3),
                dict(microbatches=3),
                dict(data=2, microbatches=3),
                dict(data=3, pipeline=2, wrap=pipeline),
            )
        ),
        (Maximum, dict(microbatches=3)),
        (OwnMean, dict(microbatches=3)),
        (max_error, dict(pipeline=2, wrap=pipeline)),
        (LastValue, dict(pipeline=2, wrap=pipeline)),
    )
    @pytest.mark.crossing(every=18)
    def test_others_are_those_of_one_device(self, metric, options):
        # Of the last batch some replicas have no row.
        expected = history(metric, rows=17, eagerly=True)
        found, said = self.said(metric, rows=17, **options)
        self.assertEqual(said, [])
        self.assertEqual(set(found), set(expected))
        for name, value in expected.items():
            same_numbers.assert_close(found[name], value, name)

    @parameterized.parameters((2, 1), (1, 3))
    def test_a_function_of_masked_time_steps_leaves_them_out(
        self, data, microbatches
    ):
        """They counted, as 0."""
        tokens = np.array([[1, 2, 3, 0], [1, 0, 0, 0], [3, 2, 0, 0]] * 8)

        def is_token(y, p):
            return ops.cast(ops.not_equal(y, 0), "float32")

        def history(strategy=None, *callbacks):
            same_numbers.reset()
            with strategy.scope() if strategy else contextlib.nullcontext():
                embedding = keras.layers.Embedding(4, 8, mask_zero=True)
                layers = [embedding, keras.layers.Dense(4)]
                model = keras.Sequential([keras.Input((4,)), *layers])
                loss = keras.losses.SparseCategoricalCrossentropy(True)
                model.compile(
                    *("sgd", loss),
                    metrics=[is_token],
                    run_eagerly=strategy is None,
                )
            return model.fit(
                *(tokens, tokens),
                batch_size=24,
                verbose=0,
                callbacks=callbacks,
            ).history["is_token"]

        strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=data))
        accumulation = tfscale.callbacks.GradientAccumulation(microbatches)
        found = history(strategy, accumulation)
        self.assertEqual(history(), [1.0])
        self.assertEqual(found, [1.0])

    def test_a_length_that_one_tensor_leaves_open_is_that_of_another(self):
        with tf.Graph().as_default():
            shapes = (None, 6), (None, None)
            tensors = [tf.compat.v1.placeholder("float32", s) for s in shapes]
            for given in (tensors, tensors[::-1]):
                _, samples = trial.traced(tf.add, given, {})
                self.assertEqual([x.shape for x in samples], [(4, 6)] * 2)


# Arguments of those that need some, and what they are given.
CLASSES = np.array([0, 1, 1, 0])
SCORES = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]], "float32")
ONE_HOT = np.eye(2, dtype="float32")[CLASSES]
ARGUMENTS = {
    "MeanIoU": dict(num_classes=2),
    "IoU": dict(num_classes=2, target_class_ids=[0]),
    "BinaryIoU": {},
    "OneHotIoU": dict(num_classes=2, target_class_ids=[0]),
    "OneHotMeanIoU": dict(num_classes=2),
    "SensitivityAtSpecificity": dict(specificity=0.5),
    "SpecificityAtSensitivity": dict(sensitivity=0.5),
    "PrecisionAtRecall": dict(recall=0.5),
    "RecallAtPrecision": dict(precision=0.5),
    "MeanRelativeError": dict(normalizer=[1.0, 2.0]),
}
ABSTRACT = ("Metric", "MeanMetricWrapper")


class MetricsOfKerasTest(parameterized.TestCase):
    @parameterized.parameters(
        *(
            (name,)
            for name, kind in inspect.getmembers(keras.metrics, inspect.isclass)
            if name not in ABSTRACT
        )
    )
    def test_all_of_keras_add_up(self, name):
        metric = getattr(keras.metrics, name)(**ARGUMENTS.get(name, {}))
        values = ONE_HOT, SCORES
        if name.startswith("Sparse") or name in ("MeanIoU", "IoU"):
            values = CLASSES, SCORES
        if name in ("MeanIoU", "IoU"):
            values = CLASSES, CLASSES
        if name in ("Mean", "Sum"):
            values = values[:1]
        metric.update_state(*values)  # some make variables then
        values = tuple(map(tf.constant, values))
        found = metric_trial.no_sum(metric, values, {})
        self.assertIsNone(found)


if __name__ == "__main__":
    tf.test.main()
