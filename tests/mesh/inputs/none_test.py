"""None among the tensors of a batch is None in the step, as on one device."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import crossings
from tests import same_numbers
from tfscale.callbacks import BackupAndRestore
from tfscale.callbacks import GradientAccumulation

RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(11, 4)).astype("float32")
Y = RANDOM.normal(size=(11, 2)).astype("float32")
WEIGHTS = np.arange(1, 12, dtype="float32")
# 11 rows in batches of 4: the last one's replicas have 2 and 1.
STARTS = range(0, 11, 4)


class Residual(keras.layers.Layer):
    def call(self, x, more=None):
        return x if more is None else x + more

    def compute_output_shape(self, x_shape, more_shape=None):
        return x_shape


class Norm(keras.Model):
    """A model that is trained without targets."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        del x, training
        if y is not None:
            raise ValueError("Here are no targets.")
        values = keras.ops.mean(keras.ops.square(y_pred), axis=-1)
        if sample_weight is not None:
            values *= sample_weight
        return keras.ops.mean(values)


def chain(x, more=None):
    h = x if more is None else Residual(name="residual")(x, more)
    h = keras.layers.Dense(4, "tanh", name="first")(h)
    return keras.layers.Dense(2, name="second")(h)


def optional_last():
    x = keras.Input((4,), name="x")
    more = keras.Input((4,), optional=True, name="more")
    return keras.Model([x, more], chain(x, more))


def optional_first():
    x = keras.Input((4,), name="x")
    more = keras.Input((4,), optional=True, name="more")
    return keras.Model({"more": more, "x": x}, chain(x, more))


def without_targets():
    x = keras.Input((4,), name="x")
    return Norm(x, chain(x))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and its batch of rows `X[r], Y[r], WEIGHTS[r]`."""

    build: Callable
    batch: Callable | None = None

    def of_rows(self, start, stop):
        rows = slice(start, stop)
        return self.batch(X[rows], Y[rows], WEIGHTS[rows])

    def batches(self):
        return (self.of_rows(start, start + 4) for start in STARTS)

    def dataset(self):
        rows = tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS))
        return rows.batch(4).map(self.batch)


CASES = {
    "optional_last": Case(optional_last, lambda x, y, w: ((x, None), y, w)),
    "optional_first": Case(
        optional_first, lambda x, y, _: ({"more": None, "x": x}, y)
    ),
    "no_targets": Case(without_targets, lambda x, _, w: (x, None, w)),
    "only_inputs": Case(without_targets, lambda x, *_: (x, None, None)),
}
MESHES = {
    "data=1": dict(data=1),
    "data=2": dict(data=2),
    "data=4": dict(data=4),
    "model=2": dict(model=2),
    "zero": dict(data=2, zero_stage=1),
    "accumulation": dict(data=2, accumulated=3),
    "accumulation_on_ranks": dict(model=2, accumulated=2),
    "steps_per_execution": dict(data=2, steps_per_execution=2),
    "pipeline": dict(pipeline=2),
    "pipelines": dict(pipeline=2, data=2),
    "pipeline_of_ranks": dict(pipeline=2, model=2),
}


def build(
    case,
    zero_stage=0,
    accumulated=None,
    steps_per_execution=1,
    **axes,
):
    """The compiled model, and callbacks for `fit`."""
    same_numbers.reset()
    scope = contextlib.nullcontext()
    if axes:
        mesh = tfscale.device_mesh(**axes)
        layouts = None
        if "model" in axes:
            layouts = keras.distribution.LayoutMap(mesh)
            layouts["first/kernel"] = (None, "model")
            layouts["second/kernel"] = ("model", None)
        scope = tfscale.MeshStrategy(
            mesh, layouts, zero_stage=zero_stage
        ).scope()
    with scope:
        model = case.build()
        if "pipeline" in axes:
            model = tfscale.PipelineModel(model, 2, balance="params")
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            "mse",
            steps_per_execution=steps_per_execution,
        )
    callbacks = [GradientAccumulation(accumulated)] if accumulated else []
    return model, callbacks


def outcome(model, callbacks, case, data):
    """Logs, results and weights."""
    method = getattr(case, data)
    steps = len(STARTS) if data == "batches" else None
    found = [
        model.fit(
            method(),
            steps_per_epoch=steps,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        ).history["loss"],
        model.evaluate(method(), steps=steps, verbose=0),
        model.predict(method(), steps=steps, verbose=0),
    ]
    if data == "dataset":
        x, y, w, *_ = *case.of_rows(0, 5), None
        found += [
            model.train_on_batch(x, y, w),
            model.test_on_batch(x, y, w),
            model.predict_on_batch(x),
        ]
    return [*found, *model.get_weights()]


@functools.cache
def on_one_device(name, data):
    case = CASES[name]
    return outcome(*build(case), case, data)


class NoneTest(parameterized.TestCase):
    def assert_same(self, expected, actual):
        for one, other in zip(expected, actual, strict=True):
            self.assertEqual(np.shape(one), np.shape(other))
            same_numbers.assert_close(other, one)

    # Keras does not take a `PyDataset` with None.
    @parameterized.parameters(
        *crossings.pairs(case=CASES, mesh=MESHES, data=("dataset", "batches"))
    )
    @pytest.mark.crossing(every=44)
    def test_is_as_on_one_device(self, case, mesh, data):
        # Refused, or "'NoneTensorSpec' object has no attribute 'shape'"; with
        # the first tensor None, replicas took the mean of unequal parts.
        expected, case = on_one_device(case, data), CASES[case]
        found = outcome(*build(case, **MESHES[mesh]), case, data)
        self.assert_same(expected, found)

    @parameterized.parameters(1, 2)
    @pytest.mark.crossing(every=2)
    def test_arrays_of_a_model_that_fit_builds(self, data):
        # Keras takes a batch to build it.
        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(2)

            def call(self, inputs):
                x, more = inputs
                return self.dense(x if more is None else x + more)

        case, found = Case(Model), []
        for axes in ({}, {"data": data}):
            model, _ = build(case, **axes)
            history = model.fit(
                [X, None], Y, batch_size=4, verbose=0, shuffle=False
            )
            found.append([history.history["loss"], *model.get_weights()])
        self.assert_same(*found)

    def test_a_required_input_is_refused_as_by_keras(self):
        for mesh in ("data=2", "pipeline"):
            model, _ = build(CASES["optional_last"], **MESHES[mesh])
            with self.assertRaisesRegex(ValueError, "not optional"):
                model.fit([None, X], Y, verbose=0)

    @parameterized.parameters(
        *crossings.pairs(
            data=(1, 2),
            fetches=(None, False, True),
            from_function=(False, True),
        )
    )
    @pytest.mark.crossing(every=6)
    def test_in_a_loop_of_the_users_own(self, data, fetches, from_function):
        def dataset(context=None):
            rows = tf.data.Dataset.from_tensor_slices(X).batch(4)
            return rows.map(lambda x: (x, None, {"more": (None, x)}))

        options = None
        if fetches is not None:
            options = tf.distribute.InputOptions(
                experimental_fetch_to_device=fetches
            )
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=data))
        method = strategy.experimental_distribute_dataset
        if from_function:
            method = strategy.distribute_datasets_from_function
        distributed = method(dataset if from_function else dataset(), options)

        def step(x, none, others):
            self.assertIsNone(none)
            self.assertIsNone(others["more"][0])
            return tf.reduce_sum(x + others["more"][1])

        def total(batch):
            return strategy.reduce("SUM", strategy.run(step, batch), axis=None)

        @tf.function
        def of_iterator(iterator):
            found, batch = 0.0, iterator.get_next_as_optional()
            while batch.has_value():
                found += total(batch.get_value())
                batch = iterator.get_next_as_optional()
            return found

        sums = [
            sum(total(batch) for batch in distributed),
            of_iterator(iter(distributed)),
        ]
        np.testing.assert_allclose(sums, [2 * X.sum()] * 2, rtol=1e-5)

    @pytest.mark.crossing
    def test_a_run_continues(self):
        class Interrupt(keras.callbacks.Callback):
            interrupts = False

            def on_train_batch_end(self, batch, logs=None):
                if self.interrupts and batch == 1:
                    raise KeyboardInterrupt

            def get_state(self):
                return None

        case, path = CASES["optional_first"], self.create_tempdir().full_path
        found = []
        for interrupts in (False, True, False):
            model, _ = build(case, **MESHES["data=2"])
            interrupt = Interrupt()
            interrupt.interrupts = interrupts
            callbacks = [interrupt]
            if found:
                callbacks.append(BackupAndRestore(path, save_freq=1))
            with contextlib.suppress(KeyboardInterrupt):
                model.fit(
                    case.dataset(), epochs=2, verbose=0, callbacks=callbacks
                )
            found.append(model.get_weights())
        self.assert_same(found[0], found[2])


if __name__ == "__main__":
    tf.test.main()
