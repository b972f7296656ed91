"""What Keras' `Model` can do, `PipelineModel` does, with the same numbers."""

import dataclasses
import functools
import os
import tempfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import forked_python
from tests import same_numbers
from tfscale.pipeline import PipelineModel

RANDOM = np.random.RandomState(0)
FEATURES = RANDOM.normal(size=(34, 6)).astype("float32")
LABELS = RANDOM.randint(0, 3, 34)
DATA = dict(x=FEATURES, y=LABELS, batch_size=16)
# No batch of another size, for which functions are traced or compiled again.
WHOLE_BATCHES = dict(x=FEATURES[:32], y=LABELS[:32], batch_size=16)


def build():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, "tanh", name="a"),
            keras.layers.BatchNormalization(name="n"),
            keras.layers.Dense(8, "tanh", name="b"),
            keras.layers.Dense(3, name="c"),
        ]
    )


def without_norm():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, "tanh", name="a")(inputs)
    x = keras.layers.Dense(8, "tanh", name="b")(x)
    return keras.Model(
        inputs, keras.layers.Dense(3, dtype="float32", name="c")(x)
    )


def job(data=DATA, fit=None, **compile):
    return same_numbers.Job(
        without_norm,
        data,
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        lambda: dict(metrics=["accuracy"], **compile),
        fit or {},
    )


class SameNumbersTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("steps_per_execution", job(steps_per_execution=2)),
        (
            "validation",
            job(fit=dict(validation_data=(FEATURES[:21], LABELS[:21]))),
        ),
        ("epochs", job(fit=dict(epochs=3, validation_split=0.3))),
        (
            "static_batches",
            job(data=dict(x=FEATURES[:24], y=LABELS[:24], batch_size=8)),
        ),
    )
    @pytest.mark.crossing(every=4)
    def test_fit(self, job):
        one = same_numbers.on_one_device(job)
        many = same_numbers.on_mesh(job, 2, 4, 2, balance=["b"])
        same_numbers.assert_same(self, one, many)

    @parameterized.parameters(1, 2)
    @pytest.mark.crossing(every=2)
    def test_jit_compile(self, num_replicas):
        rows = job(dict(x=FEATURES[:24], y=LABELS[:24], batch_size=8))
        xla = dataclasses.replace(
            rows, compile=lambda: dict(metrics=["accuracy"], jit_compile=True)
        )
        one = same_numbers.on_one_device(rows)
        many = same_numbers.on_mesh(xla, 2, 2, num_replicas, balance=["b"])
        same_numbers.assert_same(self, one, many)
        self.assertTrue(many.model.jit_compile)
        (program,) = many.model.programs
        for stage in program.stages:
            for phase in stage.phases.values():
                attributes = phase.function.function_def.attr
                self.assertTrue(attributes["_XlaMustCompile"].b)

    @pytest.mark.crossing
    def test_stages_of_recurrent_layers_are_not_compiled(self):
        # What a loop saves for its backward leaves no function of XLA: "Support
        # for TensorList crossing the XLA/TF boundary is not implemented".
        def recurrent():
            layers = [
                keras.layers.Reshape((3, 2)),
                keras.layers.SimpleRNN(4, name="a"),
                keras.layers.Dense(3, name="b"),
            ]
            return keras.Sequential([keras.Input((6,)), *layers])

        rows = dataclasses.replace(job(WHOLE_BATCHES), build=recurrent)
        xla = dataclasses.replace(
            rows, compile=lambda: dict(metrics=["accuracy"], jit_compile=True)
        )
        one = same_numbers.on_one_device(rows)
        many = same_numbers.on_mesh(xla, 2, 2, balance=["b"])
        same_numbers.assert_same(self, one, many)
        of_loop, other = next(iter(many.model.programs)).stages
        for stage, is_compiled in ((of_loop, False), (other, True)):
            for phase in stage.phases.values():
                attributes = phase.function.function_def.attr
                self.assertEqual(attributes["_XlaMustCompile"].b, is_compiled)

    def test_stages_on_cpus_are_not_compiled_beside_an_accelerator(self):
        # Which devices this machine has was asked, not which the mesh has.
        gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
        mesh = tfscale.device_mesh(pipeline=2)
        with (
            mock.patch.object(
                tf.config, "list_physical_devices", return_value=[gpu]
            ),
            tfscale.MeshStrategy(mesh).scope(),
        ):
            model = PipelineModel(build(), 2, balance=["b"])
            model.compile("sgd", "mse")
        self.assertFalse(model.model.jit_compile)

    @parameterized.parameters(
        # Each of three layers rounds three results to half precision:
        # outputs, gradients by inputs and by weights. An error of half the
        # distance from 1 to the next number in each makes 4.5 distances.
        ("mixed_float16", 4.5 * 2.0**-10),
        ("mixed_bfloat16", 4.5 * 2.0**-7),
    )
    @pytest.mark.crossing(every=2)
    def test_mixed_precision(self, policy, rtol):
        # Both sides round gradients of weights to half precision: one that of
        # the batch, the other those of the microbatches.
        def build():
            keras.config.set_dtype_policy(policy)
            return without_norm()

        mixed = dataclasses.replace(job(), build=build)
        one = same_numbers.on_one_device(mixed)
        many = same_numbers.on_mesh(mixed, 2, 3, 2, balance=["b"])
        same_numbers.assert_same(self, one, many, rtol)
        self.assertEqual(
            many.model.compute_dtype, policy.removeprefix("mixed_")
        )
        for model in (one.model, many.model):
            self.assertEqual(
                isinstance(
                    model.optimizer, keras.optimizers.LossScaleOptimizer
                ),
                policy == "mixed_float16",
            )

    @pytest.mark.crossing
    def test_overflow_skips_the_step_on_all_devices(self):
        overflows = dataclasses.replace(
            job({**DATA, "sample_weight": np.full(34, 1e6)}),
            optimizer=lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.05, momentum=0.9),
                initial_scale=2.0**127,
            ),
        )
        one = same_numbers.on_one_device(overflows)
        many = same_numbers.on_mesh(overflows, 2, 3, 2, balance=["b"])
        same_numbers.assert_same(self, one, many)
        for path, value in many.initial.items():
            np.testing.assert_array_equal(many.variables[path], value)


@functools.cache
def plain_and_pipeline():
    """Two models of the same weights, which no test changes."""

    def compile(model):
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            weighted_metrics=["accuracy"],
        )

    plain = build()
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=2, pipeline=2))
    with strategy.scope():
        inner = build()
        pipeline = PipelineModel(inner, 3, balance=["b"])
        compile(pipeline)
    inner.set_weights(plain.get_weights())
    compile(plain)
    plain.run_eagerly = True
    return plain, pipeline


class MethodsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.plain, self.pipeline = plain_and_pipeline()

    def both(self, call):
        expected = call(self.plain)
        keras.tree.map_structure(
            same_numbers.assert_close, call(self.pipeline), expected
        )

    def test_evaluate(self):
        weights = RANDOM.uniform(size=34)
        self.both(lambda model: model.evaluate(**DATA, verbose=0))
        self.both(
            lambda model: model.evaluate(
                **DATA, sample_weight=weights, return_dict=True, verbose=0
            )
        )

    def test_predict(self):
        self.both(lambda model: model.predict(FEATURES, 16, verbose=0))
        self.both(lambda model: model.predict(FEATURES[:1], verbose=0))

    def test_compile_keeps_metrics_that_it_is_not_given(self):
        def fit(wrap):
            keras.utils.set_random_seed(0)
            model = without_norm()
            model.compile("sgd", "mse", metrics=["mae"])
            model = wrap(model)
            model.compile("sgd", "mse")
            y = FEATURES[:, :3]
            history = model.fit(FEATURES, y, verbose=0, shuffle=False).history
            return {name: values[0] for name, values in history.items()}

        expected = fit(lambda model: model)
        self.assertIn("mae", expected)
        with tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2)).scope():
            found = fit(lambda model: PipelineModel(model, 2))
        self.assertEqual(found.keys(), expected.keys())
        for name, value in expected.items():
            self.assertAlmostEqual(found[name], value, 5)

    def test_metrics_see_the_shapes_of_one_device(self):
        shapes = []

        def note(y, y_pred):
            shapes.append(tuple(y_pred.shape))
            return keras.ops.mean(keras.ops.abs(y - y_pred), axis=-1)

        with tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2)).scope():
            inputs = keras.Input((6,), dtype="int32")
            x = keras.layers.Embedding(4, 8, mask_zero=True)(inputs)
            model = keras.Model(inputs, keras.layers.Dense(4)(x))
            model = PipelineModel(model, 2)
            model.compile("sgd", "mse", metrics=[note])
        # The last batch has another number of rows, which is then not known.
        model.evaluate(np.ones((5, 6)), np.ones((5, 6, 4)), 4, verbose=0)
        self.assertEqual(shapes[-1], (None, 6, 4))

    def test_sequences_of_any_length(self):
        # The plan counts with 128: outputs of other lengths were refused.
        tokens = np.random.RandomState(0).randint(0, 4, (4, 6))

        def trained():
            keras.utils.set_random_seed(0)
            inputs = keras.Input((None,), dtype="int32")
            x = keras.layers.Embedding(4, 8)(inputs)
            model = keras.Model(inputs, keras.layers.Dense(4)(x))
            in_scope = tf.distribute.has_strategy()
            if in_scope:
                model = PipelineModel(model, 2)
            model.compile("sgd", "mse", run_eagerly=not in_scope)
            model.fit(tokens, np.ones((4, 6, 4)), 4, verbose=0)
            return model.predict(tokens[:, :5], verbose=0)

        with tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2)).scope():
            found = trained()
        np.testing.assert_allclose(found, trained(), rtol=1e-6, atol=1e-6)

    def test_methods_for_one_batch(self):
        x, y = FEATURES[:8], LABELS[:8]
        self.both(lambda model: model.test_on_batch(x, y, return_dict=True))
        self.both(lambda model: model.predict_on_batch(x))

    def test_train_on_batch(self):
        model = without_norm()
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        with self.pipeline.distribute_strategy.scope():
            inner = without_norm()
            pipeline = PipelineModel(inner, 3, balance=["b"])
            pipeline.compile(keras.optimizers.SGD(0.1), "mse")
        inner.set_weights(model.get_weights())
        for batch in (slice(0, 8), slice(8, 20), slice(20, 21)):
            data = FEATURES[batch], FEATURES[batch, :3]
            keras.tree.map_structure(
                same_numbers.assert_close,
                pipeline.train_on_batch(*data, return_dict=True),
                model.train_on_batch(*data, return_dict=True),
            )
        for actual, expected in zip(inner.weights, model.weights):
            same_numbers.assert_close(actual, expected, expected.path)

    def test_call_is_the_plain_model(self):
        same_numbers.assert_close(self.pipeline(FEATURES), self.plain(FEATURES))


PROGRAM = """
import sys
for name in list(sys.modules):
    if name.partition(".")[0] == "tfscale":
        sys.modules[name] = None  # importing it is an error
import keras
import numpy as np
keras.saving.get_custom_objects().clear()
model = keras.models.load_model(sys.argv[1])
x = np.load(sys.argv[2])
np.save(sys.argv[3], model.predict(x, verbose=0))
print(type(model).__name__, model.optimizer.iterations.numpy())
"""


class SavingTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enter_context(tempfile.TemporaryDirectory())

    def pipeline(self, cut, num_replicas=1, weights=None):
        strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(data=num_replicas, pipeline=2)
        )
        with strategy.scope():
            model = PipelineModel(without_norm(), 2, balance=[cut])
            if weights is not None:
                model.load_weights(self.path(weights))
            model.compile(
                keras.optimizers.Adam(0.01),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        return model

    def path(self, name):
        return os.path.join(self.folder, name)

    def test_what_is_saved_loads_and_predicts_without_tfscale(self):
        model = self.pipeline("b")
        model.fit(**DATA, verbose=0)
        model.save(self.path("model.keras"))
        np.save(self.path("x.npy"), FEATURES)
        arguments = map(self.path, ("model.keras", "x.npy", "y.npy"))
        result = forked_python.run(["-c", PROGRAM, *arguments], self.folder)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout.split()[-2:], ["Functional", "3"])
        same_numbers.assert_close(
            np.load(self.path("y.npy")), model.predict(FEATURES, verbose=0)
        )

    @pytest.mark.crossing
    def test_a_loaded_model_trains_on_as_plain_keras_and_as_pipeline(self):
        model = self.pipeline("b")
        model.fit(**WHOLE_BATCHES, shuffle=False, verbose=0)
        model.save(self.path("model.keras"))
        plain = keras.models.load_model(self.path("model.keras"))
        plain.run_eagerly = True
        plain.fit(**WHOLE_BATCHES, shuffle=False, verbose=0)
        model.fit(**WHOLE_BATCHES, shuffle=False, verbose=0)
        for expected, actual in zip(
            plain.variables + plain.optimizer.variables,
            model.model.variables + model.optimizer.variables,
            strict=True,
        ):
            same_numbers.assert_close(actual, expected, expected.path)

    @pytest.mark.crossing
    def test_weights_go_from_any_model_to_any_other(self):
        plain = without_norm()
        plain.save_weights(self.path("plain.weights.h5"))
        early = self.pipeline("b", 2, "plain.weights.h5")
        self.equal(plain, early.model)
        early.fit(**WHOLE_BATCHES, verbose=0)
        early.save_weights(self.path("early.weights.h5"))
        late = self.pipeline("c", 1, "early.weights.h5")
        self.equal(early.model, late.model)
        plain.load_weights(self.path("early.weights.h5"))
        self.equal(early.model, plain)
        for variable in early.model.variables:
            first, second = (
                early.distribute_strategy.experimental_local_results(
                    variable.value
                )
            )
            np.testing.assert_array_equal(first, second)

    def equal(self, expected, actual):
        for a, b in zip(expected.weights, actual.weights, strict=True):
            np.testing.assert_array_equal(np.array(b), np.array(a), a.path)
