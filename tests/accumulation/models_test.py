"""Models, metrics and data of all kinds, in microbatches and in one piece."""

import contextlib
import dataclasses

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests import same_numbers
from tests.interruption import Interrupt
from tests.interruption import Interrupted
from tfscale.callbacks import GradientAccumulation

RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(22, 5)).astype("float32")
CLASSES = RANDOM.randint(0, 3, 22)
BINARY = RANDOM.randint(0, 2, (22, 1))
WEIGHTS = RANDOM.randint(0, 4, 22).astype("float32")
LENGTHS = RANDOM.randint(1, 5, (22, 1))
TOKENS = RANDOM.randint(1, 6, (22, 4)) * (np.arange(4) < LENGTHS)
IMAGES = RANDOM.normal(size=(10, 32, 32, 3)).astype("float32")
DATA = dict(x=X, y=CLASSES, batch_size=8)
layers = keras.layers


def dense(units=3, activation=None):
    x = keras.Input((5,))
    h = layers.Dense(4, "tanh", name="a")(x)
    return keras.Model(x, layers.Dense(units, activation, name="b")(h))


def binary():
    return dense(1, "sigmoid")


@keras.saving.register_keras_serializable("tests")
class Counting(layers.Dense):
    """Counts what it gives in a metric of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, inputs):
        outputs = super().call(inputs)
        self.seen.update_state(keras.ops.abs(outputs))
        return outputs


@keras.saving.register_keras_serializable("tests")
class CountingInLoop(Counting):
    """Counts row by row, in a loop."""

    def call(self, inputs):
        def count(row):
            self.seen.update_state(keras.ops.abs(row))
            return row

        return tf.map_fn(count, layers.Dense.call(self, inputs))


def counting_in_loop():
    x = keras.Input((5,))
    h = CountingInLoop(4, name="a")(x)
    return keras.Model(x, layers.Dense(3, name="b")(h))


def counting():
    x = keras.Input((5,))
    return keras.Model(x, layers.Dense(3, name="b")(Counting(4, name="a")(x)))


def lora():
    model = dense()
    for name in ("a", "b"):
        layer = model.get_layer(name)
        layer.enable_lora(2)
        layer.lora_kernel_b.assign(np.full(layer.lora_kernel_b.shape, 0.1))
    return model


def recurrent():
    x = keras.Input((4,), dtype="int32")
    h = layers.Embedding(6, 4, mask_zero=True, name="a")(x)
    return keras.Model(x, layers.Dense(3, name="b")(layers.GRU(3)(h)))


def by_names():
    one, two = keras.Input((5,), name="one"), keras.Input((5,), name="two")
    h = layers.Concatenate()(
        [layers.Dense(3, name="a")(one), layers.Dense(3, name="b")(two)]
    )
    return keras.Model(
        {"one": one, "two": two},
        {
            "left": layers.Dense(3, name="left")(h),
            "right": layers.Dense(1, name="right")(h),
        },
    )


def language_model():
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=12,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=8,
        dropout=0.0,
        max_sequence_length=4,
    )
    return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)


def photos():
    model = keras.applications.MobileNetV2(
        input_shape=IMAGES.shape[1:], alpha=0.35, weights=None, classes=3
    )
    # Those that are trained normalize each microbatch by itself.
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.trainable = False
    return model


class Applies(keras.Model):
    """By the older method, and looks at its gradients."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"updates_before": 0 * self.optimizer.iterations}


def applies():
    plain = dense()
    return Applies(plain.input, plain.output)


def adam():
    return keras.optimizers.Adam(0.05, epsilon=1e-2)


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def of_classes(**options):
    return keras.losses.SparseCategoricalCrossentropy(True, **options)


def counts():
    metrics = keras.metrics
    return dict(
        metrics=[
            *("accuracy", metrics.AUC(), metrics.Precision()),
            *(metrics.Recall(), metrics.F1Score(threshold=0.5)),
        ],
        weighted_metrics=[
            metrics.AUC(name="weighted"),
            metrics.Precision(name="weighted_precision"),
        ],
    )


def overlap():
    return dict(metrics=[keras.metrics.MeanIoU(3, sparse_y_pred=False)])


def job(build, data=None, optimizer=adam, loss=of_classes, compile=dict, **fit):
    return same_numbers.Job(build, data or DATA, optimizer, loss, compile, fit)


def batches():
    rows = tf.data.Dataset.from_tensor_slices((X, CLASSES, WEIGHTS))
    return dict(x=rows.batch(8).repeat(), steps_per_epoch=2)


def on_replicas(made):
    return same_numbers.on_zero(made, 2)


def on_ranks(made):
    return same_numbers.on_ranks(made, 2, 2)


NAMED = dict(
    x={"one": X, "two": X[::-1].copy()},
    y={"left": CLASSES, "right": BINARY + 1.0},
    sample_weight={"left": WEIGHTS, "right": WEIGHTS[::-1].copy()},
    batch_size=8,
)
NEXT = dict(
    x={"token_ids": TOKENS, "padding_mask": (TOKENS > 0).astype("int32")},
    y=np.roll(TOKENS, -1, 1),
    sample_weight=(TOKENS > 0).astype("float32"),
    batch_size=8,
)
BY_CLASS = {0: 1.0, 1: 3.0, 2: 0.2}
# How a job is made, for a dataset is made in the test, and how it is trained.
ROWS = {
    "class_weight": (
        lambda: job(
            dense,
            loss=lambda: of_classes(reduction="mean_with_sample_weight"),
            class_weight=BY_CLASS,
        ),
        on_replicas,
    ),
    "metrics": (
        lambda: job(
            binary,
            dict(x=X, y=BINARY, batch_size=8, sample_weight=WEIGHTS),
            loss=lambda: "binary_crossentropy",
            compile=counts,
        ),
        on_replicas,
    ),
    "overlap": (lambda: job(dense, compile=overlap), on_ranks),
    "metric_in_a_layer": (lambda: job(counting), on_replicas),
    "metric_in_a_loop": (lambda: job(counting_in_loop), on_replicas),
    "several_steps_in_one": (
        lambda: job(
            dense,
            dict(DATA, batch_size=4),
            compile=lambda: dict(steps_per_execution=4, run_eagerly=False),
        ),
        on_replicas,
    ),
    "ignored_class": (
        lambda: job(dense, loss=lambda: of_classes(ignore_class=2)),
        same_numbers.plain,
    ),
    "weights_in_a_dataset": (
        lambda: job(dense, batches(), epochs=2),
        same_numbers.plain,
    ),
    "lora": (lambda: job(lora), on_ranks),
    "recurrent": (
        lambda: job(recurrent, dict(DATA, x=TOKENS)),
        same_numbers.plain,
    ),
    "inputs_and_outputs_by_name": (
        lambda: job(
            by_names,
            NAMED,
            loss=lambda: {"left": of_classes(), "right": "mse"},
            compile=lambda: dict(
                metrics={"left": ["accuracy"], "right": ["mae"]},
                loss_weights={"left": 0.3, "right": 2.0},
            ),
        ),
        same_numbers.plain,
    ),
    "apply_gradients": (lambda: job(applies), same_numbers.plain),
    "matrices": (
        lambda: job(dense, optimizer=lambda: keras.optimizers.Muon(0.01)),
        same_numbers.plain,
    ),
    "keras_hub": (lambda: job(language_model, NEXT), on_ranks),
    "applications": (
        lambda: job(
            photos,
            dict(x=IMAGES, y=CLASSES[:10], batch_size=8),
            momentum,
            lambda: "sparse_categorical_crossentropy",
        ),
        same_numbers.plain,
    ),
}


class ModelsTest(parameterized.TestCase):
    @parameterized.parameters(*ROWS)
    @pytest.mark.crossing(every=18)
    def test_whole_batch(self, name):
        make, train = ROWS[name]
        expected = same_numbers.on_one_device(make())
        made = make()
        callbacks = dict(made.fit, callbacks=[GradientAccumulation(3)])
        actual = train(dataclasses.replace(made, fit=callbacks))
        same_numbers.assert_same(self, expected, actual, unmoved=("key_bias",))


class OneAfterTheOtherTest(absltest.TestCase):
    """Several times `fit`, of which some accumulate."""

    def train(self, *callbacks, run_eagerly=False):
        same_numbers.reset()
        model = dense()
        model.compile(
            *(momentum(), of_classes()),
            metrics=["accuracy"],
            run_eagerly=run_eagerly,
        )
        for each in callbacks:
            if each == "compile":
                # With slots of its own, and another function.
                model.compile(momentum(), of_classes(), run_eagerly=run_eagerly)
                continue
            with contextlib.suppress(Interrupted):
                model.fit(
                    X, CLASSES, 8, shuffle=False, verbose=0, callbacks=each
                )
        return model

    def assert_same(self, model, expected):
        for a, b in zip(
            [*model.variables, *model.optimizer.variables],
            [*expected.variables, *expected.optimizer.variables],
            strict=True,
        ):
            same_numbers.assert_close(a, b, a.path)

    @pytest.mark.crossing
    def test_with_and_without_it(self):
        both = GradientAccumulation(3), GradientAccumulation(2)
        model = self.train(
            [both[0]], [both[0]], [], [both[1]], "compile", [both[0]], []
        )
        expected = self.train(
            [], [], [], [], "compile", [], [], run_eagerly=True
        )
        self.assert_same(model, expected)

    @pytest.mark.crossing
    def test_after_an_exception(self):
        accumulation = GradientAccumulation(3)
        model = self.train(
            [accumulation, Interrupt(2)], [], [accumulation, Interrupt(2)], []
        )
        expected = self.train(
            [Interrupt(2)], [], [Interrupt(2)], [], run_eagerly=True
        )
        self.assert_same(model, expected)


if __name__ == "__main__":
    absltest.main()
