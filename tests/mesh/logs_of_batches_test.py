"""What callbacks see after a batch: the metrics of all rows until then."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers

RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(14, 5)).astype("float32")
Y = RANDOM.normal(size=(14, 4)).astype("float32")
LAYOUTS = {
    ".*a/kernel": (None, "model"),
    ".*a/bias": ("model",),
    ".*b/kernel": ("model", None),
}


class Sum(keras.metrics.Metric):
    """Its result is a variable."""

    def __init__(self):
        super().__init__()
        self.sum = self.add_variable((), "zeros")

    def update_state(self, values):
        self.sum.assign_add(keras.ops.sum(values))

    def result(self):
        return self.sum


class Logs(keras.callbacks.Callback):
    """Notes the logs of all batches."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(dict(logs))

    on_test_batch_end = on_train_batch_end


def logs_of(axes=None, microbatches=1, layouts=None, **options):
    """The logs of each batch: of 5 and 4 rows, and of 4 and 3 to validate."""
    same_numbers.reset()
    strategy = None
    if axes is not None:
        mesh = tfscale.device_mesh(**axes)
        strategy = tfscale.MeshStrategy(mesh, layouts, **options)
    with strategy.scope() if strategy else contextlib.nullcontext():
        layers = [
            keras.layers.Dense(8, "tanh", name="a"),
            keras.layers.Dense(4, name="b"),
        ]
        model = keras.Sequential([keras.Input((5,)), *layers])
        if axes is not None and "pipeline" in axes:
            model = tfscale.PipelineModel(model, 2)
        model.compile(
            "sgd",
            "mse",
            metrics=["mae"],
            weighted_metrics=["mse"],
            run_eagerly=axes is None,
        )
    logs = Logs()
    callbacks = [logs]
    if microbatches > 1:
        callbacks.append(tfscale.callbacks.GradientAccumulation(microbatches))
    model.fit(
        X,
        Y,
        batch_size=5,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        validation_data=(X[:7], Y[:7]),
        validation_batch_size=4,
    )
    return logs.found


@functools.cache
def logs_of_one_device():
    return logs_of()


def small_model(kind, strategy, **options):
    """A compiled model of one layer, of a class of models."""
    same_numbers.reset()
    with strategy.scope() if strategy else contextlib.nullcontext():
        inputs = keras.Input((5,))
        model = kind(inputs, keras.layers.Dense(4)(inputs))
        model.compile("sgd", "mse", **options)
    return model


def logs_of_steps(kind, strategy=None, microbatches=1, **options):
    """The logs of each batch of a class of models with steps of its own."""
    model, logs = small_model(kind, strategy, **options), Logs()
    callbacks = [logs]
    if microbatches > 1:
        callbacks.append(tfscale.callbacks.GradientAccumulation(microbatches))
    model.fit(X, Y, 5, verbose=0, shuffle=False, callbacks=callbacks)
    model.evaluate(X, Y, 5, verbose=0, callbacks=[logs])
    return logs.found


class LogsOfBatchesTest(parameterized.TestCase):
    @parameterized.named_parameters(
        # A batch of 4 rows leaves the last of three replicas one of them, and
        # one of 3 rows the last of four replicas none.
        ("replicas", dict(axes=dict(data=3))),
        ("a_replica_without_rows", dict(axes=dict(data=4))),
        ("accumulation", dict(axes=dict(data=2), microbatches=2)),
        ("pipeline", dict(axes=dict(data=2, pipeline=2))),
        ("ranks", dict(axes=dict(data=2, model=2), layouts=LAYOUTS)),
        (
            "sharded_weights",
            dict(
                axes=dict(data=2),
                layouts={".*a/kernel": (None, "data")},
                zero_stage=3,
            ),
        ),
    )
    @pytest.mark.crossing(every=6)
    def test_they_are_those_of_one_device(self, arguments):
        expected, found = logs_of_one_device(), logs_of(**arguments)
        self.assertLen(found, len(expected))
        for number, (one, other) in enumerate(zip(expected, found)):
            self.assertEqual(set(other), set(one))
            for name, value in one.items():
                np.testing.assert_allclose(
                    other[name], value, rtol=1e-6, err_msg=f"{number}: {name}"
                )

    @pytest.mark.crossing
    def test_a_step_may_return_its_metrics_from_a_branch(self):
        # Replicas cannot exchange values there; the sums stay those of all.
        class OwnSteps(keras.Model):
            def train_step(self, data):
                return tf.cond(
                    tf.constant(True),
                    lambda: super(OwnSteps, self).test_step(data),
                    self.get_metrics_result,
                )

            test_step = train_step

        def found(strategy=None):
            model = small_model(OwnSteps, strategy, metrics=["mae"])
            fitted = model.fit(X, Y, batch_size=5, verbose=0).history
            tested = model.evaluate(X, Y, 5, verbose=0, return_dict=True)
            return {name: fitted[name][-1] for name in fitted} | {
                f"test {name}": tested[name] for name in tested
            }

        mesh = tfscale.device_mesh(data=2)
        one, other = found(), found(tfscale.MeshStrategy(mesh))
        self.assertEqual(set(other), set(one))
        for name, value in one.items():
            np.testing.assert_allclose(other[name], value, 1e-6, err_msg=name)

    @parameterized.product(
        is_direct=[True, False], microbatches=[1, 2], run_eagerly=[False, True]
    )
    @pytest.mark.crossing(every=8)
    def test_a_step_may_log_its_loss(
        self, is_direct, microbatches, run_eagerly
    ):
        # It is a replica's share, and was logged as if it were the loss. A
        # Keras loss that a step calls by itself was a mean of means.
        class OwnSteps(keras.Model):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.tracker = keras.metrics.Mean("tracker")
                self.mean_squares = keras.losses.MeanSquaredError()

            def _loss(self, data, **options):
                x, y = data
                if is_direct:
                    return self.mean_squares(y, self(x, **options))
                return self.compute_loss(x, y, self(x, **options), **options)

            def _logs(self, loss):
                self.tracker.update_state(loss)
                return {"tracked": self.tracker.result(), "returned": loss}

            def train_step(self, data):
                with tf.GradientTape() as tape:
                    loss = self._loss(data, training=True)
                variables = self.trainable_variables
                self.optimizer.apply(tape.gradient(loss, variables), variables)
                return self._logs(loss)

            def test_step(self, data):
                return self._logs(self._loss(data, training=False))

        def found(*where):
            logs = logs_of_steps(OwnSteps, *where, run_eagerly=run_eagerly)
            return [[each["tracked"], each["returned"]] for each in logs]

        mesh = tfscale.device_mesh(data=2)
        np.testing.assert_allclose(
            found(tfscale.MeshStrategy(mesh), microbatches),
            found(),
            rtol=1e-6,
        )

    @parameterized.parameters(1, 2)
    @pytest.mark.crossing
    def test_a_step_may_return_a_metric_by_another_name(self, microbatches):
        # The guides of Keras write steps so. Keras then takes what the last
        # step returned as that of the epoch.
        class OwnSteps(keras.Model):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.error = keras.metrics.MeanAbsoluteError("error")
                self.sum = Sum()

            def results(self, y, y_pred):
                self.error.update_state(y, y_pred)
                self.sum.update_state(y)
                return {"mae": self.error.result(), "y": self.sum.result()}

            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    y_pred = self(x, training=True)
                    loss = self.compute_loss(x, y, y_pred)
                variables = self.trainable_variables
                gradients = tape.gradient(loss, variables)
                self.optimizer.apply(gradients, variables)
                return self.results(y, y_pred)

            def test_step(self, data):
                x, y = data
                return self.results(y, self(x))

        def found(strategy=None):
            logs = logs_of_steps(OwnSteps, strategy, microbatches)
            return [[each["mae"], each["y"]] for each in logs]

        mesh = tfscale.device_mesh(data=2)
        np.testing.assert_allclose(
            found(tfscale.MeshStrategy(mesh)), found(), rtol=1e-6
        )
