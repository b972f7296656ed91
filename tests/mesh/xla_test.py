"""A step that XLA compiles has the numbers of one that it does not."""

import collections
import dataclasses
import functools
import json
import math
import os
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import forked_python
from tests import same_numbers
from tests.executed_functions import executed_functions
from tests.source_files import REPOSITORY
from tests.tensor_parallel import optimizer_test
from tfscale.graphs import function_options
from tfscale.graphs import xla_clusters

layers = keras.layers
RANDOM = np.random.RandomState(0)
X = optimizer_test.DATA["x"][:20]
TOKENS = RANDOM.randint(0, 256, (20, 8)).astype("int32")
IMAGES = RANDOM.randn(20, 8, 8, 3).astype("float32")
SERIES = RANDOM.randn(20, 6, 4).astype("float32")
WORDS = RANDOM.choice(["a", "b", "c", "d"], (20, 4)).astype(object)
CLASSES = RANDOM.randn(20, 4).astype("float32")
# Has no gradient but rounding errors.
UNMOVED = ("a_key_bias", "c_bias")


def mlp(**kwargs):
    inputs = keras.Input((12,))
    x = layers.Dense(24, activation="relu", name="up")(inputs)
    x = layers.Dropout(0.2, seed=3)(x)
    return keras.Model(inputs, layers.Dense(12, name="down")(x), name="mlp")


def gpt(attends=True):
    x = inputs = keras.Input((8,), dtype="int32")
    x = layers.Embedding(256, 16, name="e")(x)
    y = layers.LayerNormalization(name="n")(x)
    if attends:
        y = layers.MultiHeadAttention(2, 8, name="a")(
            y, y, use_causal_mask=True
        )
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


class Words(layers.Layer):
    """A lookup that XLA cannot compile, and that does not say so."""

    def call(self, words):
        keys = tf.constant(["a", "b", "c"])
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(keys, tf.range(1, 4)), 0
        )
        return table.lookup(words)


def own_lookup():
    inputs = keras.Input((4,), dtype="string")
    x = layers.Embedding(4, 8, name="e")(Words(name="w")(inputs))
    return keras.Model(inputs, layers.Dense(4, name="d")(layers.Flatten()(x)))


def half():
    options = dict(dtype="mixed_float16")
    return keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(24, activation="relu", name="up", **options),
            layers.Dense(12, name="down", **options),
        ]
    )


def scaled():
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    return keras.optimizers.LossScaleOptimizer(inner)


def with_tensors(one):
    """The same on tensors: Keras takes no strings of NumPy."""
    return dataclasses.replace(
        one, data=dict(one.data, x=tf.constant(one.data["x"]))
    )


def along_the_sequence(one):
    mesh = tfscale.device_mesh(model=2)
    layout_map = same_numbers.layout_map_for(one, mesh)
    return tfscale.MeshStrategy(mesh, layout_map, sequence_parallel=True)


def job(build, x, y, **kwargs):
    # The last batch is smaller.
    return same_numbers.Job(build, dict(x=x, y=y, batch_size=8), **kwargs)


def accumulated(one):
    """The same in two microbatches."""
    callbacks = [tfscale.callbacks.GradientAccumulation(2)]
    return dataclasses.replace(one, fit=dict(callbacks=callbacks))


MLP = job(mlp, X, X)
WHOLE = job(mlp, X[:16], X[:16])
PLAIN = job(optimizer_test.mlp, X, X)
GPT = job(
    gpt,
    TOKENS,
    np.roll(TOKENS, -1, 1),
    loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
# XLA compiles for each size of a batch, and attention takes it longest: rows
# that cross them with features have neither.
TABLES = dataclasses.replace(
    GPT,
    build=functools.partial(gpt, attends=False),
    data=dict(x=TOKENS[:16], y=np.roll(TOKENS, -1, 1)[:16], batch_size=8),
)
on_two_ranks = functools.partial(
    same_numbers.on_ranks, num_ranks=2, layouts=optimizer_test.LAYOUTS
)
on_replicas = functools.partial(same_numbers.on_zero, data=2, zero_stage=0)


def unfused(one):
    """Without kernels of several operations, which round float16 once.

    TensorFlow has them on CPUs with instructions for float16.
    """
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"remapping": False})
    try:
        return on_replicas(one)
    finally:
        remapping = {"remapping": before.get("remapping", True)}
        tf.config.optimizer.set_experimental_options(remapping)


CASES = {
    "replicas": (MLP, on_replicas),
    # Its loop was an error: TensorFlow computed sizes of slices on CPU:0.
    "ranks, accumulation": (accumulated(WHOLE), on_two_ranks),
    # It was an error: TensorFlow folded constants of clusters to CPU:0.
    "stages on ranks, validation": (
        dataclasses.replace(MLP, fit=dict(validation_data=(X, X))),
        lambda one: same_numbers.on_mesh(one, 2, 2, 1, 2),
    ),
}
CROSSING = {
    "ranks": (MLP, on_two_ranks),
    "replicas and ranks": (GPT, lambda one: same_numbers.on_ranks(one, 2, 2)),
    "an embedding": (GPT, on_replicas),
    "convolutions": (job(cnn, IMAGES, CLASSES), on_replicas),
    "a recurrent layer": (job(rnn, SERIES, CLASSES), on_replicas),
    "a loss scale": (job(cnn, IMAGES, CLASSES, optimizer=scaled), on_replicas),
    "half precision": (job(half, X, X, optimizer=scaled), unfused),
    "a lookup": (
        job(own_lookup, WORDS, CLASSES),
        lambda one: on_replicas(with_tensors(one)),
    ),
    "along the sequence": (
        GPT,
        lambda one: same_numbers.plain(one, along_the_sequence(one)),
    ),
    "steps per execution": (
        dataclasses.replace(
            TABLES, compile=lambda: dict(steps_per_execution=2)
        ),
        on_replicas,
    ),
    "accumulation": (TABLES, lambda one: on_replicas(accumulated(one))),
    "accumulation and zero_stage 3": (
        TABLES,
        lambda one: on_replicas(accumulated(one), zero_stage=3),
    ),
    "zero_stage 1": (TABLES, functools.partial(on_replicas, zero_stage=1)),
    "zero_stage 2": (
        TABLES,
        lambda one: on_replicas(accumulated(one), zero_stage=2),
    ),
    "zero_stage 3": (TABLES, functools.partial(on_replicas, zero_stage=3)),
    "offload": (
        TABLES,
        functools.partial(on_replicas, zero_stage=1, offload="slots"),
    ),
    # A stage that is compiled as a whole draws other masks.
    "stages": (PLAIN, lambda one: same_numbers.on_mesh(one, 2, 2)),
}


def strategy_for(**sizes):
    mesh = tfscale.device_mesh(**sizes)
    layout_map = keras.distribution.LayoutMap(mesh)
    if sizes.get("model", 1) > 1:
        for pattern, layout in optimizer_test.LAYOUTS.items():
            layout_map[pattern] = layout
    return tfscale.MeshStrategy(mesh, layout_map)


def clusters_by_device(functions):
    """How many clusters each device has in functions that ran."""
    return collections.Counter(
        node.device
        for graphs in functions
        for graph in graphs
        for node in graph.node
        if node.op == "_XlaCompile"
    )


class CompiledStepTest(tf.test.TestCase, parameterized.TestCase):
    def check_has_the_numbers(self, one, run):
        plain = run(one)
        with executed_functions() as found:
            outcome = run(same_numbers.compiled(one))
        same_numbers.assert_same(
            self, plain, outcome, rtol=1e-6, unmoved=UNMOVED
        )
        self.assertTrue(outcome.model.jit_compile)
        return found

    @parameterized.named_parameters((n, *case) for n, case in CASES.items())
    def test_has_the_numbers_without_xla(self, one, run):
        found = self.check_has_the_numbers(one, run)
        self.assertNotEmpty(clusters_by_device(found))

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
        with executed_functions() as found:
            model.fit(words, CLASSES, verbose=0)
        self.assertEmpty(clusters_by_device(found))


class ExchangesTest(tf.test.TestCase):
    """No device waits for another in an order of its own, so none for ever.

    The clusters of replicas cannot be equal: device 0 also makes the logs. So
    what devices exchange has to stay outside of clusters. A NCCL operation of
    one process is launched once it has arrived on all devices, one such
    operation at a time (TensorFlow's `NcclManager`). Operations between workers
    run in one order: `workers_test` reads it from graphs with clusters.
    """

    def test_stay_outside_of_clusters(self):
        with tf.Graph().as_default(), xla_clusters.with_exceptions():
            x = tf.constant([1.0])
            options = dict(input=x, group_size=2, group_key=1, instance_key=1)
            exchanges = [
                tf.raw_ops.NcclAllReduce(
                    input=x, reduction="sum", num_devices=2, shared_name="a"
                ),
                tf.raw_ops.CollectiveReduceV2(
                    **options, ordering_token=[], merge_op="Add", final_op="Id"
                ),
                tf.raw_ops.CollectiveGatherV2(**options, ordering_token=[]),
            ]
        for tensor in exchanges:
            self.assertFalse(tensor.op.get_attr("_XlaCompile"), tensor.op.type)
        with self.assertRaises(ValueError):
            x.op.get_attr("_XlaCompile")


class BatchesTest(tf.test.TestCase, parameterized.TestCase):
    def check_predictions(self, **sizes):
        with strategy_for(**sizes).scope():
            model = mlp()
            if "pipeline" in sizes:
                # Batches of rows that three microbatches do not divide.
                model = tfscale.PipelineModel(model, num_microbatches=3)
            model.compile("sgd", "mse")
            expected = model.predict(X, batch_size=16, verbose=0)
            loss = model.evaluate(X, X, batch_size=16, verbose=0)
            model.compile("sgd", "mse", jit_compile=True)
        predicted = model.predict(X, batch_size=16, verbose=0)
        self.assertAllClose(predicted, expected, rtol=1e-6)
        predicted = model.predict_on_batch(X)
        self.assertAllClose(predicted, expected, rtol=1e-6)
        with executed_functions() as found:
            compiled = model.evaluate(X, X, batch_size=16, verbose=0)
        self.assertAllClose(compiled, loss, rtol=1e-6)
        self.assertLen(clusters_by_device(found), math.prod(sizes.values()))

    def test_predictions_of_a_model_that_was_not_trained(self):
        self.check_predictions(data=2)

    def test_predictions_of_model_ranks(self):
        self.check_predictions(model=2)

    def test_predictions_of_stages_on_ranks(self):
        self.check_predictions(pipeline=2, model=2)

    @pytest.mark.crossing
    def test_one_by_one_and_no_other_function_of_the_process(self):
        losses = []
        for jit_compile in (False, True):
            keras.utils.set_random_seed(1)
            with strategy_for(data=2).scope():
                model = optimizer_test.mlp()
                model.compile("sgd", "mse", jit_compile=jit_compile)
            with executed_functions() as found:
                loss = [model.train_on_batch(X[:8], X[:8])]
            self.assertFalse(function_options.have_clusters())
            losses.append([*loss, model.test_on_batch(X[:8], X[:8])])
            number = len(clusters_by_device(found))
            self.assertEqual(number, 2 if jit_compile else 0)
        self.assertAllClose(*losses, rtol=1e-6)


@functools.cache
def results_of_program():
    """What `xla_program` prints, in a process with XLA's own dumps."""
    with tempfile.TemporaryDirectory() as folder:
        done = forked_python.run(
            ["-m", "tests.mesh.xla_program", folder],
            cwd=REPOSITORY,
            env={**os.environ, "XLA_FLAGS": f"--xla_dump_to={folder}"},
            timeout=600,
        )
    if done.returncode:
        return done.stderr
    return json.loads(done.stdout.splitlines()[-1])


class ProgramTest(tf.test.TestCase):
    def test_each_size_of_a_batch_is_compiled_once(self):
        found = results_of_program()
        self.assertIsInstance(found, dict, found)
        # A trace for the first size, and one for any other.
        first, second, third = found["compiled"]
        self.assertNotEmpty(first)
        # Updates do not depend on the size.
        self.assertContainsSubset(third, second)
        self.assertNotEmpty(third)
        self.assertLen(set(first), len(first))
        self.assertLen(set(second), len(second))
        self.assertLen(set(third), len(third))
        self.assertEqual(found["again"], [[], [], []])

    def test_memory_does_not_grow(self):
        # As in keras#18145. One activation kept in each of 300 steps is twice
        # as much as is allowed.
        found = results_of_program()
        self.assertIsInstance(found, dict, found)
        before, after = found["resident"]
        self.assertLess(after - before, found["activation"] * 150)


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

    @pytest.mark.crossing
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
