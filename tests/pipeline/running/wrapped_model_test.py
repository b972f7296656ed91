"""Seen through Keras' functions a pipeline is the plain model inside."""

import copy
import os
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale

X = np.random.RandomState(0).normal(size=(8, 4)).astype("float32")


class Speaker(keras.Model):
    def generate(self):
        return "words"


def functional(kind=keras.Model):
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4, "tanh", name="a")(inputs)
    return kind(inputs, keras.layers.Dense(4, name="b")(x))


def sequential():
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(4, "tanh", name="a"),
            keras.layers.Dense(4, name="b"),
        ]
    )


def pipeline(build=functional):
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
    with strategy.scope():
        model = tfscale.PipelineModel(build(), 2, balance="params")
        model.compile("adam", "mse")
    return model


class WrappedModelTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.create_tempdir().full_path

    def saved(self, model):
        path = os.path.join(self.folder, "model.keras")
        keras.saving.save_model(model, path)
        return keras.saving.load_model(path)

    @parameterized.product(
        build=[functional, sequential], how=["saved", "copied", "pickled"]
    )
    @pytest.mark.crossing(every=6)
    def test_saved_copied_or_pickled_it_is_the_plain_model(self, build, how):
        # Nothing loaded what `keras.saving.save_model` had written.
        make = {
            "saved": self.saved,
            "copied": copy.deepcopy,
            "pickled": lambda model: pickle.loads(pickle.dumps(model)),
        }[how]
        model = pipeline(build)
        model.train_on_batch(X, X)
        plain = make(model)
        self.assertIs(type(plain), type(build()))
        for a, b in zip(
            [*plain.weights, *plain.optimizer.variables],
            [*model.weights, *model.optimizer.variables],
            strict=True,
        ):
            self.assertAllEqual(np.array(a), np.array(b))

    def test_the_old_format_of_keras_has_the_plain_model(self):
        # It named a class that nothing loads; then that was refused, but Keras
        # had emptied the file before it asked.
        path = os.path.join(self.folder, "model.h5")
        model = pipeline()
        model.train_on_batch(X, X)
        keras.saving.save_model(model, path)
        self.assertIsInstance(model, tfscale.PipelineModel)
        # Of a loss that is a string Keras does not load its own files.
        loaded = keras.saving.load_model(path, compile=False)
        self.assertIs(type(loaded), type(model.model))
        for a, b in zip(loaded.weights, model.weights, strict=True):
            self.assertAllEqual(np.array(a), np.array(b))

    def test_clones_are_plain_models(self):
        model = pipeline()
        for clone in (
            keras.models.clone_model(model),
            keras.models.model_from_json(model.to_json()),
            tfscale.PipelineModel.from_config(model.get_config()),
        ):
            self.assertIsInstance(clone, type(model.model))
            self.assertEqual(
                [layer.name for layer in clone.layers],
                [layer.name for layer in model.layers],
            )

    @parameterized.parameters("all.weights.h5", "all.weights.json")
    def test_weights_go_through_keras_functions(self, name):
        first, second = pipeline(), pipeline()
        path = os.path.join(self.folder, name)
        size = {"max_shard_size": 1} if name.endswith("json") else {}
        keras.saving.save_weights(first, path, **size)
        keras.saving.load_weights(second, path)
        for a, b in zip(first.weights, second.weights, strict=True):
            self.assertAllEqual(np.array(a), np.array(b))

    def test_layers_inputs_and_outputs_are_those_of_the_model_inside(self):
        # A callback that reads `model.layers` found the model alone.
        model = pipeline()
        self.assertEqual(model.layers, model.model.layers)
        self.assertIs(model.get_layer("b"), model.model.layers[-1])
        self.assertEqual(model.input_shape, (None, 4))
        self.assertEqual(model.output_shape, (None, 4))
        self.assertIs(model.outputs[0], model.model.outputs[0])
        self.assertEqual(model.count_params(), model.model.count_params())

    def test_what_only_the_model_inside_has_is_named(self):
        model = pipeline(lambda: functional(Speaker))
        with self.assertRaisesRegex(
            AttributeError, "'generate'.*type Speaker.*model.generate"
        ):
            model.generate()
        with self.assertRaisesRegex(AttributeError, "no attribute 'genrate'"):
            model.genrate()

    def test_it_quantizes_the_plain_model(self):
        model = pipeline()
        model.quantize("int8", filters="^[ab]$")
        self.assertEqual(model.get_layer("b").quantization_mode, "int8")
        path = os.path.join(self.create_tempdir(), "model.tflite")
        litert = dict(format="litert", verbose=False)
        with self.assertRaisesRegex(ValueError, "layer 'a'.*to int8"):
            model.export(path, **litert)
        # When this does not fail, Keras or TensorFlow has mended it.
        with self.assertRaisesRegex(Exception, "fully_connected"):
            model.model.export(path, **litert)

    def test_it_can_be_compiled_from_what_it_was_compiled_with(self):
        model = pipeline()
        expected = model.test_on_batch(X, X)
        model.compile_from_config(model.get_compile_config())
        self.assertIsInstance(model.optimizer, keras.optimizers.Adam)
        self.assertAllClose(model.test_on_batch(X, X), expected)

    def test_callbacks_work_as_on_a_plain_model(self):
        model = pipeline()
        names, path = [], os.path.join(self.folder, "best.keras")

        def note(epoch, logs):
            del epoch, logs
            names.extend(layer.name for layer in model.layers)

        model.fit(
            X,
            X,
            epochs=3,
            verbose=0,
            callbacks=[
                keras.callbacks.LambdaCallback(on_epoch_end=note),
                keras.callbacks.EarlyStopping(
                    "loss", min_delta=9.0, restore_best_weights=True
                ),
                keras.callbacks.LearningRateScheduler(lambda _, rate: rate / 2),
                keras.callbacks.ModelCheckpoint(path),
                keras.callbacks.ModelCheckpoint(
                    os.path.join(self.folder, "best.weights.h5"),
                    save_weights_only=True,
                ),
                keras.callbacks.BackupAndRestore(
                    os.path.join(self.folder, "backup")
                ),
            ],
        )
        # After two epochs, with the weights of the first.
        self.assertEqual(names[-2:], ["a", "b"])
        self.assertAllClose(model.optimizer.learning_rate.numpy(), 0.001 / 4)
        after_two = keras.saving.load_model(path)
        self.assertEqual(after_two.optimizer.iterations.numpy(), 2)
        self.assertNotAllClose(
            np.array(after_two.weights[0]), np.array(model.weights[0])
        )
