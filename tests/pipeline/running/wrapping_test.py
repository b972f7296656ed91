"""What `PipelineModel` is given that it cannot use is refused in words."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale

MESH = {"pipeline": 2}
X = np.random.RandomState(0).normal(size=(8, 4)).astype("float32")


def build(kind=keras.Model, layer=keras.layers.Identity):
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4, "tanh", name="a")(inputs)
    return kind(inputs, keras.layers.Dense(4, name="b")(layer()(x)))


def pipeline(model=build, num_microbatches=2, axes=MESH, **options):
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(**axes))
    with strategy.scope():
        pipeline = tfscale.PipelineModel(
            model(), num_microbatches, balance="params", **options
        )
        pipeline.compile("sgd", "mse")
    return pipeline


class OwnTrainStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


class OwnMetrics(keras.Model):
    def compute_metrics(self, *args, **kwargs):
        return super().compute_metrics(*args, **kwargs)


class OwnPredictStep(keras.Model):
    def predict_step(self, data):
        return 2.0 * super().predict_step(data)


class Unseeded(keras.layers.Layer):
    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x))


class WrappingTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (dict(num_microbatches="4"), TypeError, "num_microbatches='4'"),
        (dict(num_microbatches=2.5), TypeError, "num_microbatches=2.5"),
        (dict(num_microbatches=True), TypeError, "num_microbatches=True"),
        (dict(microbatch_size=0), ValueError, "microbatch_size=0"),
        (dict(recompute="no"), TypeError, "True or False.*recompute='no'"),
        (dict(memory_limit="1GB"), TypeError, "bytes.*'1GB'.*16 \\* 2\\*\\*30"),
        (dict(memory_limit=0), ValueError, "positive.*memory_limit=0"),
    )
    def test_wrong_arguments(self, options, error, message):
        # They were compared, divided by or taken for true.
        with self.assertRaisesRegex(error, message):
            pipeline(**options)

    @parameterized.parameters(
        (OwnTrainStep, "type OwnTrainStep, whose `train_step`.*compute_loss"),
        (OwnTrainStep, r"teacher and a student as.*\[student\(x\), teacher"),
        (OwnMetrics, "`compute_metrics` would.*subclass"),
    )
    def test_own_steps(self, kind, message):
        # They were ignored.
        with self.assertRaisesRegex(ValueError, message):
            pipeline(lambda: build(kind))

    def test_own_predict_step_is_refused_when_it_is_due(self):
        model = pipeline(lambda: build(OwnPredictStep))
        model.train_on_batch(X, X)
        with self.assertRaisesRegex(ValueError, r"model.model.predict\(...\)"):
            model.predict(X, verbose=0)

    def test_numpy_numbers_are_numbers(self):
        self.assertEqual(
            pipeline(num_microbatches=np.int64(2)).plan.schedule,
            tfscale.schedules.one_f_one_b(2, 2),
        )

    @parameterized.parameters(dict(pipeline=2), dict(data=2))
    @pytest.mark.crossing(every=2)
    def test_variables_made_after_wrapping(self, **axes):
        # They were left out of training.
        one, model = build(), pipeline(axes=axes)
        one.compile("sgd", "mse")
        one.set_weights([v.numpy() for v in model.weights])
        for each in (one, model):
            keras.utils.set_random_seed(0)
            each.get_layer("b").enable_lora(1)
            each.fit(X, X, shuffle=False, epochs=2, verbose=0)
        for ours, plain in zip(model.weights, one.weights, strict=True):
            self.assertAllClose(ours.numpy(), plain.numpy(), 1e-6, 1e-6)
        self.assertNotAllClose(one.get_layer("b").lora_kernel_b, [[0.0] * 4])
        # An optimizer knows what it was built for.
        model.get_layer("a").enable_lora(1)
        with self.assertRaisesRegex(ValueError, "was originally built"):
            model.fit(X, X, verbose=0)

    def test_draws_from_the_generator_of_all(self):
        # Every microbatch of every step would get the same numbers.
        model = pipeline(lambda: build(layer=Unseeded))
        with self.assertRaisesRegex(ValueError, "SeedGenerator.*of the layer"):
            model.fit(X, X, verbose=0)

    def test_a_step_before_there_are_variables(self):
        model = pipeline()

        @tf.function(autograph=False)
        def step():
            return model.distribute_strategy.run(
                model.train_step, args=((tf.constant(X), tf.constant(X)),)
            )

        with self.assertRaisesRegex(ValueError, r"test_on_batch\(x, y\)"):
            step()
        expected = model.test_on_batch(X, X)
        self.assertAllClose(step()["loss"], expected)

    @parameterized.named_parameters(
        ("sparse", tf.sparse.from_dense, "a SparseTensor.*to_dense"),
        ("ragged", tf.RaggedTensor.from_tensor, "a RaggedTensor.*to_tensor"),
    )
    def test_inputs_that_are_not_dense(self, make, message):
        with self.assertRaisesRegex(ValueError, message):
            pipeline().fit(make(X), X, verbose=0)

    def test_data_without_a_batch(self):
        # A bare StopIteration came out of `fit`.
        with self.assertRaisesRegex(ValueError, "data without any.*filter"):
            pipeline().fit(X[:0], X[:0], verbose=0)

    def test_predictions_for_no_rows(self):
        # Keras: "cannot access local variable 'batch_outputs'".
        with self.assertRaisesRegex(ValueError, "predict.*data without any"):
            pipeline().predict(X[:0], verbose=0)

    def test_strings_that_only_the_preprocessor_of_a_task_takes(self):
        model = pipeline()
        model.model.preprocessor = len
        data = tf.data.Dataset.from_tensors((["a", "b"], np.ones((2, 4))))
        for run in (model.fit, model.predict):
            with self.assertRaisesRegex(ValueError, "must be preprocessed"):
                run(data, verbose=0)

    def test_a_mesh_with_stages_and_no_pipeline(self):
        # It trained on one device of each row.
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=4))
        with strategy.scope():
            model = build()
            model.compile("sgd", "mse")
        with self.assertRaisesRegex(ValueError, "pipeline=4.*PipelineModel"):
            model.fit(X, X, verbose=0)

    def test_a_second_model_that_is_not_wrapped(self):
        # It trained on one device of each row, where another one was cut.
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
        with strategy.scope():
            inner, forgotten = build(), build()
            wrapped = tfscale.PipelineModel(inner, 2)
            for model in (wrapped, forgotten):
                model.compile("sgd", "mse")
        with self.assertRaisesRegex(ValueError, "was not cut.*PipelineModel"):
            forgotten.fit(X, X, verbose=0)
        wrapped.fit(X, X, verbose=0)
        # To predict is as ever, by what the pipeline has trained too.
        self.assertEqual(forgotten.predict(X, verbose=0).shape[0], len(X))
        self.assertEqual(inner.predict(X, verbose=0).shape[0], len(X))

    @parameterized.product(
        run=(
            lambda model: model.predict(X, verbose=0),
            lambda model: model.evaluate(X, X, verbose=0),
            lambda model: model.fit(X, X, verbose=0).history["loss"],
            lambda model: model.train_on_batch(X, X),
        ),
        model=(1, 2),
    )
    @pytest.mark.crossing(every=8)
    def test_a_model_inside_that_is_quantized_later(self, run, model):
        # What had been traced went on with the float weights.
        def quantized(inner, wrapped):
            before = run(wrapped)
            inner.quantize("int8", filters="^[ab]$")
            return before, run(wrapped), wrapped.predict(X, verbose=0)

        mesh = tfscale.device_mesh(pipeline=2, model=model)
        layout_map = keras.distribution.LayoutMap(mesh)
        if model == 2:
            layout_map["a/kernel"] = (None, "model")
            layout_map["b/kernel"] = ("model", None)
        strategy = tfscale.MeshStrategy(mesh, layout_map)
        keras.utils.set_random_seed(0)
        one = build()
        one.compile(keras.optimizers.SGD(0.1), "mse")
        keras.utils.set_random_seed(0)
        with strategy.scope():
            inner = build()
            wrapped = tfscale.PipelineModel(inner, 2, balance="params")
            wrapped.compile(keras.optimizers.SGD(0.1), "mse")
        before, expected, outputs = quantized(one, one)
        found = quantized(inner, wrapped)
        self.assertNotAllClose(before, expected, rtol=1e-6, atol=1e-6)
        for ours, plain in zip(found, (before, expected, outputs)):
            self.assertAllClose(ours, plain, rtol=1e-6, atol=1e-6)
        # What is new lies on the devices of its stage.
        for device, name in zip(strategy.device_rows[0], "ab"):
            layer = inner.get_layer(name)
            self.assertEqual(layer.kernel.dtype, "int8")
            for variable in layer.variables:
                values = strategy.experimental_local_results(variable.value)
                self.assertEqual(values[0].device, device, variable.path)
