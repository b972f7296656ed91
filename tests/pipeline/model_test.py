"""What a user may do wrong with a `PipelineModel`, and what it answers."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale


def _layers(num_layers=4):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,), name="features")
    x = inputs
    for index in range(num_layers):
        x = keras.layers.Dense(8, activation="tanh", name=f"dense_{index}")(x)
    return keras.Model(inputs, x, name="tower")


def _strategy(**axes):
    return tfscale.MeshStrategy(tfscale.device_mesh(**axes))


def _pipeline(make_layers=None, num_microbatches=2, **options):
    """A compiled pipeline of two stages, of some layers or of a tower."""
    with _strategy(pipeline=2).scope():
        model = (
            keras.Sequential([keras.Input((8,)), *make_layers()])
            if make_layers
            else _layers()
        )
        model = tfscale.PipelineModel(model, num_microbatches, **options)
        model.compile("sgd", "mse")
    return model


def _data(rows=8, seed=0):
    x = np.random.default_rng(seed).normal(size=(rows, 8))
    return x.astype("float32"), x.astype("float32")


class RaisesAtNegative(keras.layers.Layer):
    """Passes on what it gets, and fails where the first number is negative."""

    def call(self, x):
        check = tf.debugging.assert_non_negative(x[0, 0], "a negative number")
        with tf.control_dependencies([check]):
            return tf.identity(x)


class RaisesInGradient(keras.layers.Layer):
    """Likewise, but not before the backward."""

    def call(self, x):
        @tf.custom_gradient
        def passed(x):
            def gradient(dy):
                check = tf.debugging.assert_non_negative(
                    x[0, 0], "a negative number"
                )
                with tf.control_dependencies([check]):
                    return tf.identity(dy)

            return tf.identity(x), gradient

        return passed(x)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="subclassed")
        self.dense = keras.layers.Dense(8)

    def call(self, x):
        return self.dense(x)


class WrapTest(tf.test.TestCase, parameterized.TestCase):
    def test_model_outside_any_strategy_is_refused(self):
        with self.assertRaisesRegex(
            ValueError, r"scope of a `tfscale.MeshStrategy`.*scope\(\)"
        ):
            tfscale.PipelineModel(_layers(), 2)

    def test_model_built_outside_the_scope_is_refused(self):
        model = _layers()
        with (
            _strategy(pipeline=2).scope(),
            self.assertRaisesRegex(ValueError, "dense_0/kernel', made outside"),
        ):
            tfscale.PipelineModel(model, 2)

    def test_subclassed_model_is_refused(self):
        with _strategy(pipeline=2).scope():
            model = Subclassed()
            model(np.zeros((1, 8)))
            with self.assertRaisesRegex(
                ValueError, "'subclassed' of type Subclassed.*keras.Model"
            ):
                tfscale.PipelineModel(model, 2)

    def test_unbuilt_sequential_is_refused(self):
        with _strategy(pipeline=2).scope():
            model = keras.Sequential([keras.layers.Dense(1)], name="lazy")
            with self.assertRaisesRegex(
                ValueError, "must be built.*'lazy'.*keras.Input"
            ):
                tfscale.PipelineModel(model, 2)

    def test_no_keras_model_is_refused(self):
        with (
            _strategy(pipeline=2).scope(),
            self.assertRaisesRegex(TypeError, "keras.Model.*Received: 'gpt'"),
        ):
            tfscale.PipelineModel("gpt", 2)

    def test_less_than_one_microbatch_is_refused(self):
        with (
            _strategy(pipeline=2).scope(),
            self.assertRaisesRegex(ValueError, "num_microbatches=0"),
        ):
            tfscale.PipelineModel(_layers(), 0)

    def test_more_stages_than_layers_are_refused(self):
        with (
            _strategy(pipeline=3).scope(),
            self.assertRaisesRegex(
                ValueError, "3 stages.*'tower' with 2 layers.*pipeline=2"
            ),
        ):
            tfscale.PipelineModel(_layers(2), 2)

    def test_schedule_for_other_sizes_is_refused(self):
        with (
            _strategy(pipeline=2).scope(),
            self.assertRaisesRegex(ValueError, "for 4 devices and 8 micro"),
        ):
            tfscale.PipelineModel(
                _layers(), 2, schedule=tfscale.schedules.gpipe(4, 8)
            )

    def test_cut_point_that_is_no_layer_is_refused(self):
        with (
            _strategy(pipeline=2).scope(),
            self.assertRaisesRegex(ValueError, "dence_2.*dense_2"),
        ):
            tfscale.PipelineModel(_layers(), 2, balance=["dence_2"])

    def test_compile_outside_the_scope_is_refused(self):
        with _strategy(pipeline=2).scope():
            model = tfscale.PipelineModel(_layers(), 2)
        with self.assertRaisesRegex(ValueError, "`compile` must be called in"):
            model.compile("sgd", "mse")

    def test_synchronized_batch_normalization_is_refused(self):
        with (
            _strategy(pipeline=2).scope(),
            self.assertRaisesRegex(ValueError, "'norm' with synchronized=True"),
        ):
            norm = keras.layers.BatchNormalization(
                synchronized=True, name="norm"
            )
            layers = [keras.Input((8,)), keras.layers.Dense(8), norm]
            tfscale.PipelineModel(keras.Sequential(layers), 2)


class FailingStepTest(tf.test.TestCase, parameterized.TestCase):
    def test_loss_that_is_not_finite_ends_training_and_changes_nothing(self):
        model = _pipeline(
            lambda: [
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(8),
            ],
            balance="params",
        )
        x, y = _data()
        model.fit(x, y, verbose=0)
        before = [np.array(variable) for variable in model.variables]
        y[3, 3] = np.nan
        with self.assertRaisesRegex(
            FloatingPointError, "loss must be finite.*NaN.*changed no variable"
        ):
            model.fit(x, y, verbose=0)
        for old, variable in zip(before, model.variables):
            if "loss" not in variable.path:  # Keras' trackers of the epoch
                self.assertAllEqual(old, np.array(variable))
        model.fit(*_data(), verbose=0)

    @parameterized.parameters("guard", "gradient_guard")
    @pytest.mark.crossing(every=2)
    def test_failing_layer_is_named_with_its_stage_and_training_goes_on(
        self, name
    ):
        guards = {"guard": RaisesAtNegative, "gradient_guard": RaisesInGradient}
        model = _pipeline(
            lambda: [
                keras.layers.Dense(8),
                keras.layers.Dense(8),
                guards[name](name=name),
                keras.layers.Dense(8),
            ],
            balance=[name],
        )
        good, bad = np.ones((8, 8)), np.ones((8, 8))
        bad[4] = -1.0  # the first row of the second microbatch
        model.optimizer.learning_rate = 0.0
        model.set_weights([np.ones(w.shape) for w in model.weights])
        model.fit(good, good, verbose=0)
        before = model.get_weights()
        begin = time.monotonic()
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError,
            rf"(?s)Layer '{name}' of pipeline stage 1 failed.*a negative num",
        ):
            model.fit(bad, bad, verbose=0, shuffle=False)
        self.assertLess(time.monotonic() - begin, 60)
        for old, new in zip(before, model.get_weights()):
            self.assertAllEqual(old, new)
        model.fit(good, good, verbose=0)

    def test_layer_that_cannot_be_traced_is_named_with_its_stage(self):
        class Untraceable(keras.layers.Layer):
            def call(self, x, training=None):
                if training:
                    raise RuntimeError("not in training")
                return x

        model = _pipeline(
            lambda: [keras.layers.Dense(8), Untraceable(name="stubborn")],
            balance=["stubborn"],
        )
        with self.assertRaises(RuntimeError) as caught:
            model.fit(*_data(), verbose=0)
        told = f"{caught.exception} {caught.exception.__notes__}"
        self.assertRegex(told, "not in training")
        self.assertRegex(told, "In layer 'stubborn' of pipeline stage 1")

    @parameterized.parameters("map", "cond")
    @pytest.mark.crossing(every=2)
    def test_a_metric_updated_in_a_loop_is_refused_by_name(self, kind):
        class Seen(keras.layers.Layer):
            def __init__(self):
                super().__init__(name="seen")
                self.largest = keras.metrics.Mean(name="largest")

            def call(self, x):
                def update(value):
                    self.largest.update_state(keras.ops.max(value))
                    return value

                if kind == "map":
                    return tf.map_fn(update, x)
                return tf.cond(x[0, 0] > 0, lambda: update(x), lambda: x)

        model = _pipeline(
            lambda: [keras.layers.Dense(8), Seen(), keras.layers.Dense(8)]
        )
        with self.assertRaisesRegex(
            ValueError, "Received: .*largest/total' in stage"
        ):
            model.fit(*_data(), verbose=0)

    def test_predicts_quantized_before_it_is_compiled(self):
        with _strategy(pipeline=2).scope():
            plain = _layers()
            model = tfscale.PipelineModel(plain, 2)
        for layer in plain.layers[1:]:
            layer.quantize("int8")
        expected = plain(_data()[0])
        found = model.predict(_data()[0], verbose=0)
        self.assertAllClose(found, expected, rtol=1e-5)


class PythonFunction(keras.layers.Layer):
    def call(self, x):
        y = tf.py_function(lambda v: v * tf.abs(v), [x], tf.float32)
        return tf.ensure_shape(y, x.shape)

    def compute_output_shape(self, shape):
        return shape


class PythonFunctionTest(parameterized.TestCase):
    def fit(self, num_microbatches):
        x = np.random.RandomState(0).normal(size=(8, 6)).astype("float32")
        keras.utils.clear_session()
        with tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2)).scope():
            dense = [keras.layers.Dense(6, name=name) for name in "ab"]
            layers = [keras.Input((6,)), dense[0], PythonFunction(name="py")]
            model = tfscale.PipelineModel(
                keras.Sequential([*layers, dense[1]]),
                num_microbatches,
                balance=["b"],
            )
            model.compile("sgd", "mse")
        return model.fit(x, x, verbose=0, epochs=2).history["loss"]

    def test_of_a_gradient_runs_in_one_microbatch(self):
        first, second = self.fit(1)
        self.assertLess(second, first)

    def test_of_a_gradient_is_refused_in_several(self):
        # TensorFlow said "KeyError: b'pyfunc_..'" in the middle of a step.
        with self.assertRaisesRegex(ValueError, "py.*several microb.*numpy_fu"):
            self.fit(2)


class Recomputed(keras.layers.Layer):
    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def build(self, shape):
        if hasattr(self.function, "build"):
            self.function.build(shape)

    def call(self, x):
        return keras.remat(self.function)(x)


class RecomputedTest(parameterized.TestCase):
    def losses(self, function, **axes):
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        x = np.random.RandomState(0).normal(size=(8, 6)).astype("float32")
        with tfscale.MeshStrategy(tfscale.device_mesh(**axes)).scope():
            layers = [Recomputed(function(), name="re"), keras.layers.Dense(6)]
            model = keras.Sequential([keras.Input((6,)), *layers])
            if axes:
                model = tfscale.PipelineModel(model, 2)
            model.compile("sgd", "mse")
        return model.fit(x, x, verbose=0, epochs=3).history["loss"]

    def test_weights_in_what_keras_recomputes_are_refused(self):
        # They had no gradient, and were not trained.
        with self.assertRaisesRegex(ValueError, "'.*kernel'.*recompute=True"):
            self.losses(lambda: keras.layers.Dense(6), pipeline=2)

    def test_a_function_without_weights_is_recomputed(self):
        expected = self.losses(lambda: keras.ops.gelu)
        found = self.losses(lambda: keras.ops.gelu, pipeline=2)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


class WrappedModelTest(tf.test.TestCase):
    def test_summary_is_that_of_the_plain_model(self):
        lines = []
        _pipeline().summary(print_fn=lines.append)
        self.assertIn('Model: "tower"', "\n".join(map(str, lines)))

    @pytest.mark.crossing
    def test_what_is_saved_is_the_plain_model_with_its_optimizer(self):
        model = _pipeline()
        x, y = _data()
        model.fit(x, y, verbose=0)
        path = self.create_tempfile("model.keras").full_path
        model.save(path)
        loaded = keras.models.load_model(path)
        self.assertEqual(type(loaded).__module__.split(".")[0], "keras")
        self.assertAllClose(loaded.predict(x, verbose=0), model.predict(x))
        self.assertEqual(int(loaded.optimizer.iterations), 1)
        loaded.fit(x, y, verbose=0)


if __name__ == "__main__":
    tf.test.main()
