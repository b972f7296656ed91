"""A compiled model that is wrapped goes on where it was."""

import os

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers

RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(12, 4)).astype("float32")
Y = RANDOM.normal(size=(12, 4)).astype("float32")


def build():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4, "tanh", name="a")(inputs)
    return keras.Model(inputs, keras.layers.Dense(4, name="b")(x))


class ResumingTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (dict(pipeline=2), {}), (dict(data=2, pipeline=2), dict(zero_stage=1))
    )
    @pytest.mark.crossing(every=2)
    def test_a_saved_model_trains_on_with_its_slots(self, axes, options):
        # It was refused: loaded without its optimizer it began anew.
        plain = build()
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        plain.compile(
            keras.optimizers.Adam(schedule, clipnorm=0.5),
            "mse",
            metrics=["mae"],
        )
        plain.run_eagerly = True
        plain.fit(X, Y, shuffle=False, verbose=0, batch_size=6)
        path = os.path.join(self.create_tempdir().full_path, "model.keras")
        plain.save(path)
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(**axes), **options)
        with strategy.scope():
            model = keras.saving.load_model(path)
            model = tfscale.PipelineModel(model, 3, balance="params")
        fit = dict(shuffle=False, verbose=0, batch_size=6)
        expected = plain.fit(X, Y, **fit).history
        found = model.fit(X, Y, **fit).history
        for name, value in expected.items():
            same_numbers.assert_close(found[name], value, name)
        for a, b in zip(
            [*model.weights, *model.optimizer.variables],
            [*plain.weights, *plain.optimizer.variables],
            strict=True,
        ):
            same_numbers.assert_close(np.array(a), np.array(b), b.path)
        # Slots are beside their variables.
        slot = model.optimizer.variables[-1]
        self.assertEqual(
            [x.device for x in strategy.experimental_local_results(slot.value)],
            [ranks[0] for _, *ranks in strategy.device_rows],
        )

    def test_layers_may_be_frozen_before_it_is_wrapped(self):
        # Slots of all weights were copied to those of fewer: "zip() argument 2
        # is longer than argument 1".
        plain = build()
        plain.compile(keras.optimizers.Adam(0.1), "mse")
        plain.run_eagerly = True
        plain.fit(X, Y, shuffle=False, verbose=0)
        path = os.path.join(self.create_tempdir().full_path, "model.keras")
        plain.save(path)
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
        with strategy.scope():
            inner = keras.saving.load_model(path)
            inner.get_layer("a").trainable = False
            model = tfscale.PipelineModel(inner, 3)
        plain.get_layer("a").trainable = False
        plain.make_train_function(force=True)
        for each in (plain, model):
            each.fit(X, Y, shuffle=False, verbose=0)
        for a, b in zip(
            [*model.weights, *model.optimizer.variables],
            [*plain.weights, *plain.optimizer.variables],
            strict=True,
        ):
            same_numbers.assert_close(np.array(a), np.array(b), b.path)

    def test_a_task_that_compiles_itself_is_taken_as_it_is(self):
        # keras_hub's tasks do so in their constructors.
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
        with strategy.scope():
            task = keras_hub.models.FNetTextClassifier(
                keras_hub.models.FNetBackbone(
                    9, 1, 4, 8, dropout=0.0, max_sequence_length=5
                ),
                num_classes=2,
                preprocessor=None,
            )
            model = tfscale.PipelineModel(task, 2)
        self.assertIs(model.optimizer, task.optimizer)
        self.assertIsInstance(
            model.loss, keras.losses.SparseCategoricalCrossentropy
        )
        tokens = RANDOM.randint(0, 9, (4, 5))
        logs = model.train_on_batch(
            {"token_ids": tokens, "segment_ids": 0 * tokens},
            np.array([0, 1, 1, 0]),
            return_dict=True,
        )
        self.assertIn("sparse_categorical_accuracy", logs)
        with strategy.scope():
            model.compile("sgd", "mse")
        self.assertIsInstance(task.optimizer, keras.optimizers.SGD)
