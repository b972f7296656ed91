"""A suffix on cached activations learns what the whole model would."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers

RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(24, 6)).astype("float32")
Y = RANDOM.normal(size=(24, 3)).astype("float32")


def chain():
    """Layers d0 to d3, of which the first two are frozen."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(6, "tanh", name=f"d{i}") for i in range(3)]
    model = keras.Sequential(
        [keras.Input((6,)), *layers, keras.layers.Dense(3, name="d3")]
    )
    model.layers[0].trainable = model.layers[1].trainable = False
    return model


def residual(nested=False):
    """Two blocks with a skip connection each, and two outputs."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((6,), name="x")
    for i in range(2):
        z = keras.layers.Dense(6, "tanh", name=f"in_{i}")(x)
        x = keras.layers.Add(name=f"add_{i}")([x, z])
    if nested:
        x = keras.Model(inputs, x)(inputs)
    outputs = {n: keras.layers.Dense(3, name=n)(x) for n in ("a", "b")}
    model = keras.Model(inputs, outputs)
    body = model.layers[1] if nested else model
    body.get_layer("in_0").trainable = False
    return model


def pipeline(*data, **options):
    return tfscale.data.pipeline(
        tfscale.data.arrays(data), batch_size=8, seed=3, **options
    )


class Shaken(keras.layers.Layer):
    """Draws from TensorFlow's hidden state, which no generator tells of."""

    def call(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs))


class FractionallyPooled(keras.layers.Layer):
    """Draws its windows; pooled and spread out again, the shape stays."""

    def call(self, inputs):
        image = inputs[:, :, tf.newaxis, tf.newaxis]
        pooled, *_ = tf.nn.fractional_max_pool(image, (1, 1.5, 1, 1))
        return tf.repeat(pooled[:, :, 0, 0], 2, axis=1)[:, :6]


class NegativelySampled(keras.layers.Layer):
    def call(self, inputs):
        sampled, *_ = tf.random.log_uniform_candidate_sampler(
            tf.zeros((1, 1), tf.int64), 1, 6, False, 6
        )
        return tf.gather(inputs, sampled, axis=1)


class Penalised(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(tf.reduce_mean(inputs))
        return inputs


class Counting(keras.layers.Layer):
    def build(self, input_shape):
        self.count = self.add_weight(name="count", trainable=False)

    def call(self, inputs):
        self.count.assign_add(1.0)
        return inputs + self.count


class CutTest(tf.test.TestCase, parameterized.TestCase):
    def check(self, build, layer, y, strategy=None, file=None):
        """Losses and weights are those of the whole model, frozen as it is."""
        is_plain = strategy is None
        strategy = strategy or tf.distribute.get_strategy()
        with strategy.scope():
            whole, model = build(), build()
            whole.compile("sgd", "mse", run_eagerly=is_plain)
            prefix, suffix = tfscale.cut(model, layer)
            suffix.compile("sgd", "mse")
        features = prefix.predict(X, batch_size=8, verbose=0)
        if file is not None:
            np.save(file, features)
            features = np.load(file, mmap_mode="r")
        fit = dict(epochs=3, verbose=0)
        expected = whole.fit(pipeline(X, y), **fit).history
        found = suffix.fit(pipeline(features, y), **fit).history
        for name, values in expected.items():
            same_numbers.assert_close(found[name], values, name)
        for a, b in zip(model.weights, whole.weights, strict=True):
            same_numbers.assert_close(
                keras.ops.convert_to_numpy(a),
                keras.ops.convert_to_numpy(b),
                a.path,
            )
        return prefix, suffix

    @parameterized.parameters("memory", "file")
    @pytest.mark.crossing(every=2)
    def test_a_suffix_learns_what_the_whole_model_would(self, where):
        file = None
        if where == "file":
            file = os.path.join(self.create_tempdir().full_path, "x.npy")
        prefix, suffix = self.check(chain, "d2", Y, file=file)
        self.assertEqual([x.name for x in prefix.layers[1:]], ["d0", "d1"])
        self.assertEqual([x.name for x in suffix.layers[1:]], ["d2", "d3"])
        self.assertLen(suffix.weights, 4)

    @parameterized.parameters(False, True)
    @pytest.mark.crossing
    def test_skips_structures_and_nested_models(self, nested):
        y = {"a": Y, "b": 2 * Y}
        self.check(lambda: residual(nested), "in_1", y)

    def test_nested_models_may_have_layers_of_one_name(self):
        # They were opened on both sides of the cut: "The name "h" is used 2
        # times in the model".
        x = inputs = keras.Input((4,))
        for name in "abc":
            dense = keras.layers.Dense(4, "tanh", name="h")
            x = keras.Sequential([keras.Input((4,)), dense], name=name)(x)
        model = keras.Model(inputs, keras.layers.Dense(2, name="end")(x))
        for layer in model.layers[:-1]:
            layer.trainable = False
        prefix, suffix = tfscale.cut(model, "end")
        data = np.ones((2, 4), "float32")
        features = prefix.predict(data, verbose=0)
        np.testing.assert_array_equal(
            suffix.predict(features, verbose=0), model.predict(data, verbose=0)
        )

    @pytest.mark.crossing
    def test_on_replicas(self):
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=2))
        self.check(chain, "d2", Y, strategy)

    def test_of_a_pipeline_as_a_pipeline(self):
        whole = chain()
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
        with strategy.scope():
            model = tfscale.PipelineModel(chain(), 2)
            prefix, suffix = tfscale.cut(model, "d2")
            suffix = tfscale.PipelineModel(suffix, 2)
            suffix.compile("sgd", "mse")
        whole.compile("sgd", "mse", run_eagerly=True)
        features = prefix.predict(X, verbose=0)
        whole.fit(pipeline(X, Y), verbose=0)
        suffix.fit(pipeline(features, Y), verbose=0)
        for a, b in zip(model.model.weights, whole.weights, strict=True):
            same_numbers.assert_close(
                keras.ops.convert_to_numpy(a), b.numpy(), a.path
            )

    @parameterized.parameters(
        ("d4", "Received: 'd4'. Layers are"),
        ("d0", "the first layer"),
        ("d3", "variable .*d2/kernel"),
    )
    def test_places_to_cut_at(self, layer, message):
        with self.assertRaisesRegex(ValueError, message):
            tfscale.cut(chain(), layer)

    def test_skips_that_cross_are_named(self):
        with self.assertRaisesRegex(ValueError, "'add_0', 'in_1' cross"):
            tfscale.cut(residual(), "add_1")
        with self.assertRaisesRegex(ValueError, "'x', 'in_0' cross"):
            tfscale.cut(residual(), "add_0")

    @parameterized.parameters(
        (keras.layers.Dropout, (0.1,), "draws random numbers"),
        (keras.layers.GaussianNoise, (0.1,), "draws random numbers"),
        # Once cached: they were missing among what draws.
        (FractionallyPooled, (), "draws random numbers"),
        (NegativelySampled, (), "draws random numbers"),
        (
            lambda: keras.layers.BatchNormalization(center=False, scale=False),
            (),
            "updates its statistics",
        ),
        (
            lambda: keras.layers.Activation("relu", activity_regularizer="l2"),
            (),
            "adds to the loss",
        ),
        (Shaken, (), "draws random numbers"),
        (Penalised, (), "adds to the loss"),
        (Counting, (), "updates its statistics in training: .*count"),
    )
    def test_layers_that_train_otherwise_are_refused(self, make, args, message):
        model = keras.Sequential(
            [keras.Input((6,)), make(*args), keras.layers.Dense(3, name="d")]
        )
        with self.assertRaisesRegex(ValueError, message):
            tfscale.cut(model, "d")

    @parameterized.parameters(
        # Of an operation in 3.15, of a layer later.
        (keras.layers.LSTM, "'not_equal' cross|Masks cannot be cached"),
        (keras.layers.Dense, "Masks cannot be cached"),  # it masks the loss
    )
    def test_masks_that_cross_are_refused(self, kind, message):
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                keras.layers.Embedding(9, 4, mask_zero=True, trainable=False),
                kind(3, name="second"),
            ]
        )
        with self.assertRaisesRegex(ValueError, message):
            tfscale.cut(model, "second")


if __name__ == "__main__":
    tf.test.main()
