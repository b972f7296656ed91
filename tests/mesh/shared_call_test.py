"""A model's call is traced by one replica, and made by all."""

import functools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tfscale.adapters import shared_model

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(11, 8, 8, 3)).astype("float32")
TOKENS = RANDOM.integers(20, size=(11, 6))
Y = RANDOM.normal(size=(11, 2)).astype("float32")
layers = keras.layers


def convolutions():
    x = inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Dropout(0.3)(layers.ReLU()(x))
    x = layers.Add()([x, layers.Conv2D(8, 3, padding="same")(x)])
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(2)(x))


def masked_tokens():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(inputs)
    x = layers.MultiHeadAttention(2, 4, dropout=0.2)(x, x)
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(2)(x))  # of each token


def called_twice():
    inner = keras.Sequential(
        [keras.Input((8,)), layers.Dense(8, "gelu"), layers.Dense(8)]
    )
    inputs = keras.Input((8, 8, 3))
    x = layers.Dense(8)(layers.Flatten()(inputs))
    x = layers.BatchNormalization()(inner(inner(x)))
    return keras.Model(inputs, layers.Dense(2)(keras.ops.tanh(x) * 2.0))


def in_bfloat16():
    inputs = keras.Input((8, 8, 3))
    x = layers.Flatten()(inputs)
    for _ in range(2):
        x = layers.Dense(8, "relu", dtype="mixed_bfloat16")(x)
    return keras.Model(inputs, layers.Dense(2, dtype="float32")(x))


def normalized():
    normalize = layers.Normalization()
    normalize.adapt(IMAGES)
    inputs = keras.Input((8, 8, 3))
    x = layers.Flatten()(layers.Rescaling(0.5)(normalize(inputs)))
    return keras.Model(inputs, layers.Dense(2)(x))


def regularized():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Flatten(),
            layers.Dense(
                4, kernel_regularizer="l2", kernel_constraint="max_norm"
            ),
            layers.GaussianNoise(0.1),
            layers.Dense(2, trainable=False),
        ]
    )


class Doubling:
    def __call__(self, x):
        return x * 2


def with_another_call():
    layer = layers.Dense(4)
    call = layer.call
    layer.call = functools.wraps(call)(lambda *args, **kwargs: call(*args))
    return layer


def in_one_execution(model):
    model.compile("adam", "mse", steps_per_execution=2)
    model.fit(IMAGES, Y, batch_size=3, shuffle=False, verbose=0)


def by_batches(model):
    for rows in (4, 4, 3):
        model.train_on_batch(IMAGES[:rows], Y[:rows])


def frozen(model):
    model.layers[1].trainable = False
    model.compile("adam", "mse")
    trained(model, IMAGES)
    model.layers[1].trainable = True
    model.compile("adam", "mse")


def with_lora(model):
    model.layers[-1].enable_lora(1)
    model.compile("adam", "mse")


def with_other_weights(model):
    model.set_weights([np.abs(w) * 0.5 for w in model.get_weights()])


def on_mesh(build, data=3, optimizer="adam", loss="mse", **options):
    keras.utils.set_random_seed(0)
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=data), **options)
    with strategy.scope():
        model = build()
        of_run = optimizer() if callable(optimizer) else optimizer
        model.compile(of_run, loss)
    return model


def trained(model, x, y=Y):
    # The last batch has a replica without a row.
    history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    return history.history["loss"], [v.numpy() for v in variables]


class SharedCallTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        # Rounded otherwise, two rows that a layer normalizes differ much.
        before = keras.config.floatx(), keras.config.dtype_policy()
        self.addCleanup(keras.config.set_floatx, before[0])
        self.addCleanup(keras.config.set_dtype_policy, before[1])
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")

    def assert_as_apart(self, build, x, y=Y, **options):
        found = trained(on_mesh(build, **options), x, y)
        with same_numbers.calls_of_each_replica():
            wanted = trained(on_mesh(build, **options), x, y)
        rtol = 1e-2 if build is in_bfloat16 else 1e-9
        self.assertAllClose(found[0], wanted[0], rtol=rtol)
        for one, other in zip(found[1], wanted[1], strict=True):
            self.assertAllClose(one, other, rtol=rtol, atol=rtol)

    @parameterized.named_parameters(
        ("convolutions", convolutions, IMAGES),
        ("called_twice", called_twice, IMAGES),
        ("in_bfloat16", in_bfloat16, IMAGES),
        ("regularized", regularized, IMAGES),
        ("normalized", normalized, IMAGES),
        ("masked", masked_tokens, TOKENS, np.ones((11, 6, 2), "float32")),
    )
    @pytest.mark.crossing(every=6)
    def test_numbers_are_those_of_a_call_of_each_replica(self, build, *data):
        self.assert_as_apart(
            build, *data, optimizer=lambda: keras.optimizers.SGD(0.1)
        )

    @parameterized.parameters(
        ("softmax", "categorical_crossentropy"),
        ("sigmoid", "binary_crossentropy"),
    )
    @pytest.mark.crossing(every=2)
    def test_losses_that_look_behind_an_activation(self, activation, loss):
        # Keras takes the logits of the operation.
        def build():
            inputs = keras.Input((8, 8, 3))
            x = layers.Dense(4)(layers.Flatten()(inputs))
            return keras.Model(inputs, layers.Dense(2, activation)(x))

        self.assert_as_apart(build, IMAGES, np.abs(Y), loss=loss)

    def test_several_outputs_are_made_by_each(self):
        # What leads to one without a loss has no gradient.
        def build():
            inputs = keras.Input((8, 8, 3))
            x = layers.Flatten()(inputs)
            return keras.Model(inputs, [layers.Dense(2)(x), layers.Dense(3)(x)])

        model = on_mesh(build, 2, loss=["mse", None])
        extended = model.distribute_strategy.extended
        self.assertFalse(shared_model.can_share(extended, model))

    @pytest.mark.crossing
    def test_a_model_that_compute_loss_calls_again(self):
        class Again(keras.Model):
            def compute_loss(self, x, y, y_pred, *args, **kwargs):
                loss = super().compute_loss(x, y, y_pred, *args, **kwargs)
                again = self(x * 2.0, training=False)
                return loss + keras.ops.mean(keras.ops.abs(again - y_pred))

        def build():
            plain = convolutions()
            return Again(plain.inputs, plain.outputs)

        self.assert_as_apart(
            build, IMAGES, optimizer=lambda: keras.optimizers.SGD(0.1)
        )

    @parameterized.named_parameters(
        (case.__name__, case)
        for case in (
            in_one_execution,
            by_batches,
            frozen,
            with_lora,
            with_other_weights,
        )
    )
    @pytest.mark.crossing(every=5)
    def test_training_goes_on(self, change):
        def outcome():
            model = on_mesh(convolutions, data=2, optimizer="sgd")
            before = trained(model, IMAGES)
            with model.distribute_strategy.scope():
                change(model)
            return before, trained(model, IMAGES)

        found = outcome()
        with same_numbers.calls_of_each_replica():
            wanted = outcome()
        self.assertAllClose(found, wanted, rtol=1e-9, atol=1e-9)

    def times_traced(self, model):
        calls = []
        call = layers.Dense.call

        def counting(layer, *args, **kwargs):
            calls.append(layer)
            return call(layer, *args, **kwargs)

        with mock.patch.object(layers.Dense, "call", counting):
            model.fit(IMAGES[:8], Y[:8], batch_size=8, verbose=0)
        return len(calls)

    def test_layers_are_called_once_for_all_replicas(self):
        on_two, on_four = (
            self.times_traced(on_mesh(convolutions, count)) for count in (2, 4)
        )
        self.assertEqual(on_four, on_two)
        with same_numbers.calls_of_each_replica():
            each = self.times_traced(on_mesh(convolutions, 4))
        self.assertEqual(each, on_four + 3)

    @parameterized.named_parameters(
        ("lambda", lambda: layers.Lambda(lambda x: x * 2)),
        ("activation", lambda: layers.Dense(4, lambda x: x * 2)),
        ("object", lambda: layers.Dense(4, Doubling())),
        ("call", with_another_call),
        ("class", lambda: type("Mine", (layers.Dense,), {})(4)),
        ("loss", lambda: layers.Dense(4, activity_regularizer="l2")),
        ("sums", lambda: layers.BatchNormalization(synchronized=True)),
        ("weights", lambda: layers.SpectralNormalization(layers.Dense(4))),
        (
            "groups",
            lambda: keras.Sequential(
                [
                    layers.Reshape((32, 6)),
                    layers.Conv1D(4, 1, groups=2),
                    layers.Flatten(),
                ]
            ),
        ),
        (
            "loop",
            lambda: keras.Sequential([layers.Reshape((8, 24)), layers.GRU(2)]),
        ),
    )
    @pytest.mark.crossing(every=3)
    def test_what_may_know_the_replica_is_called_by_each(self, layer):
        def build():
            inputs = keras.Input((8, 8, 3))
            x = layer()(layers.Flatten()(inputs))
            return keras.Model(inputs, layers.Dense(2, name="last")(x))

        model = on_mesh(build, 2)
        extended = model.distribute_strategy.extended
        self.assertFalse(shared_model.can_share(extended, model))
        trained(model, IMAGES)

    def test_updates_of_each_replica_leave_the_call_to_each(self):
        for options in (
            {"optimizer": "nadam"},
            {"zero_stage": 1},
        ):
            model = on_mesh(convolutions, 2, **options)
            extended = model.distribute_strategy.extended
            self.assertFalse(shared_model.can_share(extended, model))

    def test_what_a_mesh_of_one_replica_does_is_as_before(self):
        model = on_mesh(convolutions, 1)
        extended = model.distribute_strategy.extended
        self.assertFalse(shared_model.can_share(extended, model))


if __name__ == "__main__":
    absltest.main()
