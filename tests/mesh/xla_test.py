"""A step that XLA compiles has the numbers of one that it does not."""

import contextlib
import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.tensor_parallel import optimizer_test
from tfscale._internals import symbols
from tfscale.graphs import xla_clusters

layers = keras.layers
RANDOM = np.random.RandomState(0)
X = optimizer_test.DATA["x"]
TOKENS = RANDOM.randint(0, 256, (20, 8)).astype("int32")
IMAGES = RANDOM.randn(20, 8, 8, 3).astype("float32")
SERIES = RANDOM.randn(20, 6, 4).astype("float32")
CLASSES = RANDOM.randn(20, 4).astype("float32")
# Has no gradient but rounding errors.
UNMOVED = ("a_key_bias", "c_bias")


def mlp(**kwargs):
    inputs = keras.Input((12,))
    x = layers.Dense(24, activation="relu", name="up")(inputs)
    x = layers.Dropout(0.2, seed=3)(x)
    return keras.Model(inputs, layers.Dense(12, name="down")(x), name="mlp")


def gpt():
    x = inputs = keras.Input((8,), dtype="int32")
    x = layers.Embedding(256, 16, name="e")(x)
    y = layers.LayerNormalization(name="n")(x)
    y = layers.MultiHeadAttention(2, 8, name="a")(y, y, use_causal_mask=True)
    x = layers.Add()([x, y])
    y = layers.Dense(32, "gelu", name="up")(x)
    y = layers.Dropout(0.2, seed=3)(y)
    x = layers.Add()([x, layers.Dense(16, name="down")(y)])
    return keras.Model(inputs, layers.Dense(256, name="h")(x))


def cnn():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3, name="c", padding="same"),
            layers.BatchNormalization(name="b"),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4, name="d"),
        ]
    )


def rnn():
    return keras.Sequential(
        [
            keras.Input((6, 4)),
            layers.LSTM(8, name="l", dropout=0.2, seed=3),
            layers.Dense(4, name="d"),
        ]
    )


def lookup():
    words = layers.StringLookup(vocabulary=["a", "b", "c"])
    inputs = keras.Input((4,), dtype="string")
    x = layers.Embedding(4, 8, name="e")(words(inputs))
    return keras.Model(inputs, layers.Dense(4, name="d")(layers.Flatten()(x)))


def scaled():
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    return keras.optimizers.LossScaleOptimizer(inner)


def job(build, x, y, **kwargs):
    # The last batch is smaller.
    return same_numbers.Job(build, dict(x=x, y=y, batch_size=8), **kwargs)


def accumulated(one):
    """The same in two microbatches."""
    callbacks = [tfscale.callbacks.GradientAccumulation(2)]
    return dataclasses.replace(one, fit=dict(callbacks=callbacks))


MLP = job(mlp, X, X)
PLAIN = job(optimizer_test.mlp, X, X)
GPT = job(
    gpt,
    TOKENS,
    np.roll(TOKENS, -1, 1),
    loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
on_replicas = functools.partial(same_numbers.on_zero, data=2, zero_stage=0)
CASES = {
    "replicas": (MLP, on_replicas),
    "ranks": (
        MLP,
        lambda one: same_numbers.on_ranks(
            one, 2, layouts=optimizer_test.LAYOUTS
        ),
    ),
}
CROSSING = {
    "replicas and ranks": (GPT, lambda one: same_numbers.on_ranks(one, 2, 2)),
    "an embedding": (GPT, on_replicas),
    "convolutions": (job(cnn, IMAGES, CLASSES), on_replicas),
    "a recurrent layer": (job(rnn, SERIES, CLASSES), on_replicas),
    "a loss scale": (job(cnn, IMAGES, CLASSES, optimizer=scaled), on_replicas),
    "steps per execution": (
        dataclasses.replace(GPT, compile=lambda: dict(steps_per_execution=2)),
        on_replicas,
    ),
    "accumulation": (GPT, lambda one: on_replicas(accumulated(one))),
    "accumulation and zero_stage 3": (
        GPT,
        lambda one: on_replicas(accumulated(one), zero_stage=3),
    ),
    "zero_stage 1": (GPT, functools.partial(on_replicas, zero_stage=1)),
    "zero_stage 2": (
        GPT,
        lambda one: on_replicas(accumulated(one), zero_stage=2),
    ),
    "zero_stage 3": (GPT, functools.partial(on_replicas, zero_stage=3)),
    "offload": (
        GPT,
        functools.partial(on_replicas, zero_stage=1, offload="slots"),
    ),
    # A stage that is compiled as a whole draws other masks.
    "stages": (PLAIN, lambda one: same_numbers.on_mesh(one, 2, 2)),
    "stages on ranks": (MLP, lambda one: same_numbers.on_mesh(one, 2, 2, 1, 2)),
}


def strategy_for(**sizes):
    mesh = tfscale.device_mesh(**sizes)
    layout_map = keras.distribution.LayoutMap(mesh)
    if sizes.get("model", 1) > 1:
        for pattern, layout in optimizer_test.LAYOUTS.items():
            layout_map[pattern] = layout
    return tfscale.MeshStrategy(mesh, layout_map)


def compiled(one):
    """The same, compiled by XLA."""
    return dataclasses.replace(
        one, compile=lambda: {**one.compile(), "jit_compile": True}
    )


@contextlib.contextmanager
def partitions():
    """Collects the graphs of devices that are made within it."""
    context, found = symbols.eager_context.context(), []
    context.enable_run_metadata()
    yield found
    metadata = context.export_run_metadata()
    context.disable_run_metadata()
    for function in metadata.function_graphs:
        found += function.partition_graphs


def clusters_by_device(graphs):
    """What each cluster takes and makes, for each device."""
    found = {}
    for graph in graphs:
        for node in graph.node:
            if node.op == "_XlaCompile":
                takes = [node.attr[key] for key in ("Tconstants", "Targs")]
                takes = [tuple(attr.list.type) for attr in takes]
                resources = node.attr["Nresources"].i
                found.setdefault(node.device, []).append((*takes, resources))
    return found


class CompiledStepTest(tf.test.TestCase, parameterized.TestCase):
    def check_has_the_numbers(self, one, run):
        plain = run(one)
        with partitions() as graphs:
            outcome = run(compiled(one))
        same_numbers.assert_same(
            self, plain, outcome, rtol=1e-6, unmoved=UNMOVED
        )
        self.assertTrue(outcome.model.jit_compile)
        return graphs

    @parameterized.named_parameters((n, *case) for n, case in CASES.items())
    def test_has_the_numbers_without_xla(self, one, run):
        graphs = self.check_has_the_numbers(one, run)
        self.assertNotEmpty(clusters_by_device(graphs))

    @parameterized.named_parameters((n, *case) for n, case in CROSSING.items())
    @pytest.mark.crossing
    def test_has_the_numbers_of_features_without_xla(self, one, run):
        self.check_has_the_numbers(one, run)

    def test_one_layer_that_cannot_turns_xla_off(self):
        words = tf.constant([["a", "b", "c", "d"]] * 20)
        with strategy_for(data=2).scope():
            model = lookup()
            with self.assertWarnsRegex(UserWarning, "jit_compile"):
                model.compile("sgd", "mse", jit_compile=True)
        with partitions() as graphs:
            model.fit(words, CLASSES, verbose=0)
        self.assertEmpty(clusters_by_device(graphs))

    def test_microbatches_of_model_ranks_are_refused(self):
        one = compiled(accumulated(MLP))
        with self.assertRaisesRegex(ValueError, "jit_compile=True.*model=2"):
            same_numbers.on_ranks(one, 2, layouts=optimizer_test.LAYOUTS)


class PredictionsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(dict(data=2), dict(model=2))
    def test_of_a_model_that_was_not_trained(self, **sizes):
        with strategy_for(**sizes).scope():
            model = mlp()
            model.compile("sgd", "mse")
            expected = model.predict(X, batch_size=16, verbose=0)
            loss = model.evaluate(X, X, batch_size=16, verbose=0)
            model.compile("sgd", "mse", jit_compile=True)
        found = model.predict(X, batch_size=16, verbose=0)
        self.assertAllClose(found, expected, rtol=1e-6)
        found = model.predict_on_batch(X)
        self.assertAllClose(found, expected, rtol=1e-6)
        with partitions() as graphs:
            found = model.evaluate(X, X, batch_size=16, verbose=0)
        self.assertAllClose(found, loss, rtol=1e-6)
        self.assertLen(clusters_by_device(graphs), 2)

    def test_other_functions_of_the_process_are_not_compiled(self):
        with strategy_for(data=2).scope():
            model = mlp()
            model.compile("sgd", "mse", jit_compile=True)
        model.train_on_batch(X[:16], X[:16])
        self.assertFalse(xla_clusters.are_on())
        with xla_clusters.clusters():
            self.assertTrue(xla_clusters.are_on())


class CompiledByHandTest(tf.test.TestCase):
    def test_around_several_devices_is_refused(self):
        strategy = strategy_for(data=2)
        with self.assertRaisesRegex(ValueError, "2 devices.*model.compile"):
            tf.function(
                lambda: strategy.run(tf.zeros, ((),)), jit_compile=True
            )()

    def test_of_model_ranks_is_refused(self):
        strategy = strategy_for(model=2)
        with strategy.scope():
            optimizer_test.mlp()
        compiled = tf.function(lambda: tf.zeros(()), jit_compile=True)
        with self.assertRaisesRegex(ValueError, "2 devices.*model.compile"):
            strategy.run(compiled)

    def test_on_one_device_has_the_numbers_of_keras(self):
        losses = []
        for strategy in (tf.distribute.get_strategy(), strategy_for(data=1)):
            keras.utils.set_random_seed(1)
            with strategy.scope():
                model = optimizer_test.mlp()
                model.compile("sgd", "mse", jit_compile=True)
            history = model.fit(X, X, shuffle=False, verbose=0)
            losses.append(history.history["loss"])
        self.assertAllClose(*losses)


if __name__ == "__main__":
    tf.test.main()
