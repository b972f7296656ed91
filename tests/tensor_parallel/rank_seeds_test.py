"""Random layers: one mask for all ranks, or a mask of each rank's own.

The models here have weights that make a mask their output. In the sharded
region, each rank draws for its part of the units:

    ones (b, 8*) -> Dropout -> identity (8*, 8) -> mask of all ranks (b, 8)

In the replicated one each rank draws for all of them, and a column-parallel
kernel [I I] then shows the mask of the first rank and that of the second.
"""

import dataclasses
import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.tensor_parallel import same_numbers_test as jobs

LAYERS = keras.layers
UNITS = 8
RATE = 0.3
PAIR = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}


def sharded(layer, **kwargs):
    """Draws for the part of the units that a rank has."""
    x = inputs = keras.Input((UNITS,))
    ones = dict(kernel_initializer="zeros", bias_initializer="ones")
    x = LAYERS.Dense(UNITS, name="up", **ones)(x)
    x = layer(x)
    same = dict(kernel_initializer="identity", use_bias=False)
    return keras.Model(inputs, LAYERS.Dense(UNITS, name="down", **same)(x))


class Twice(keras.initializers.Initializer):
    """The kernel [I I]."""

    def __call__(self, shape, dtype=None):
        return tf.tile(tf.eye(shape[0], dtype=dtype), [1, 2])


def replicated(layer):
    """Draws for all units on each rank."""
    inputs = keras.Input((UNITS,))
    x = layer(inputs + 1.0)
    both = dict(kernel_initializer=Twice(), use_bias=False)
    return keras.Model(inputs, LAYERS.Dense(2 * UNITS, name="up", **both)(x))


def dropout(seed=7):
    return LAYERS.Dropout(RATE, seed=seed)


def dropped_parts():
    return sharded(dropout())


def dropped_whole():
    return replicated(dropout())


def draw(build, rows=512, calls=1, num_ranks=2, num_replicas=1):
    """What a model gives in training, by call, of the first replica."""
    same_numbers.reset()
    mesh = tfscale.device_mesh(data=num_replicas, model=num_ranks)
    layouts = {} if num_ranks == 1 else PAIR
    if build is dropped_whole:
        layouts = {".*up/kernel": (None, "model")}
    strategy = tfscale.MeshStrategy(mesh, layouts)
    with strategy.scope():
        model = build()
    x = np.zeros((rows, UNITS), "float32")
    run = tf.function(
        lambda: strategy.run(lambda: model(x, training=True)), autograph=False
    )
    return [
        [
            np.array(value)
            for value in strategy.experimental_local_results(run())
        ]
        for _ in range(calls)
    ]


def masks(build, **kwargs):
    """Masks of the two ranks, of each call."""
    return [
        np.split(of_replicas[0] != 0, 2, axis=1)
        for of_replicas in draw(build, **kwargs)
    ]


class MasksTest(tf.test.TestCase, parameterized.TestCase):
    def test_are_equal_where_activations_are_replicated(self):
        first, second = masks(dropped_whole)[0]
        np.testing.assert_array_equal(first, second)
        self.assertBetween(first.mean(), 0.65, 0.75)

    def test_are_each_ranks_own_where_activations_are_sharded(self):
        first, second = masks(dropped_parts)[0]
        # As often equal as masks are that have nothing to do with each other.
        self.assertAllClose(
            (first == second).mean(), RATE**2 + (1 - RATE) ** 2, atol=0.05
        )

    def test_have_the_rate_and_scale_of_the_layer(self):
        ((found,),) = draw(dropped_parts, rows=4096)
        # Six standard deviations of the mean of that many.
        spread = 6 * np.sqrt(RATE * (1 - RATE) / found.size)
        self.assertAllClose((found == 0).mean(), RATE, rtol=0, atol=spread)
        np.testing.assert_allclose(found[found != 0], 1 / (1 - RATE), rtol=1e-6)

    def test_are_others_in_each_call(self):
        for build in (dropped_parts, dropped_whole):
            calls = masks(build, calls=3)
            for one, other in ((0, 1), (1, 2)):
                for rank in range(2):
                    self.assertLess(
                        (calls[one][rank] == calls[other][rank]).mean(), 0.65
                    )

    def test_are_the_same_for_a_seed(self):
        def found(seed):
            return draw(lambda: sharded(dropout(seed)), calls=2)

        self.assertAllEqual(found(7), found(7))
        self.assertNotAllEqual(found(7), found(8))

    def test_are_each_replicas_own_the_first_ones_as_alone(self):
        ((alone,),) = draw(dropped_parts)
        ((first, second),) = draw(dropped_parts, num_replicas=2)
        np.testing.assert_array_equal(first, alone)
        parts = [*np.split(first, 2, axis=1), *np.split(second, 2, axis=1)]
        for one, other in itertools.combinations(parts, 2):
            self.assertAllClose(
                ((one != 0) == (other != 0)).mean(),
                RATE**2 + (1 - RATE) ** 2,
                atol=0.05,
            )

    def test_of_one_rank_are_those_of_plain_keras(self):
        keras.utils.set_random_seed(1)
        x = np.zeros((32, UNITS), "float32")
        expected = np.array(sharded(dropout())(x, training=True))
        ((found,),) = draw(dropped_parts, 32, num_ranks=1, num_replicas=1)
        np.testing.assert_array_equal(found, expected)


class SharedTest(tf.test.TestCase):
    """What cannot draw for parts only makes its activation whole."""

    def assert_like_one_device(self, build):
        keras.utils.set_random_seed(1)
        x = np.zeros((64, UNITS), "float32")
        expected = np.array(build()(x, training=True))
        with self.assertWarnsRegex(UserWarning, "without a partner"):
            ((found,),) = draw(build, 64)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        self.assertGreater(expected.std(), 0.1)

    def test_a_layer_that_draws_for_both(self):
        def build():
            layer = dropout()
            x = inputs = keras.Input((UNITS,))
            ones = dict(kernel_initializer="zeros", bias_initializer="ones")
            x = layer(LAYERS.Dense(UNITS, name="up", **ones)(x))
            same = dict(kernel_initializer="identity", use_bias=False)
            x = LAYERS.Dense(UNITS, name="down", **same)(x)
            return keras.Model(inputs, layer(x))

        self.assert_like_one_device(build)

    def test_a_seed_that_is_a_number(self):
        class Fixed(LAYERS.Layer):
            def call(self, x):
                return keras.random.dropout(x, RATE, seed=3)

        self.assert_like_one_device(lambda: sharded(Fixed()))

    def test_noise_of_a_shape_that_is_known(self):
        self.assert_like_one_device(
            lambda: sharded(LAYERS.GaussianNoise(0.5, seed=3))
        )


def attention(build):
    x = inputs = keras.Input((UNITS,))
    x = LAYERS.Reshape((2, UNITS // 2))(x)
    return keras.Model(inputs, build(x))


def multi_head(x):
    return LAYERS.MultiHeadAttention(
        2, 4, dropout=RATE, use_bias=False, name="attention", seed=5
    )(x, x)


def grouped_query(x):
    return LAYERS.GroupQueryAttention(
        4, 2, 1, dropout=RATE, use_bias=False, name="attention", seed=5
    )(x, x)


HEADS = {
    ".*(query|value|key)/kernel": (None, "model", None),
    ".*attention_output/kernel": ("model", None, None),
}
GROUPS = {
    ".*query/kernel": (None, "model", None),
    ".*attention_output/kernel": ("model", None, None),
}


def seeds_of_ranks(build, layouts):
    """Seeds that random operations of dropout get on each device."""
    mesh = tfscale.device_mesh(model=2)
    strategy = tfscale.MeshStrategy(mesh, layouts)
    with strategy.scope():
        model = attention(build)
    x = np.zeros((4, UNITS), "float32")

    @tf.function(autograph=False)
    def run():
        strategy.run(lambda: model(x, training=True))
        graph = tf.compat.v1.get_default_graph()
        return {
            op.name: op.inputs[0]
            for op in graph.get_operations()
            if op.type == "StatelessRandomGetKeyCounter"
            and "stateless_dropout" in op.name
        }

    return {name: tuple(seed.numpy()) for name, seed in run().items()}


class AttentionTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((multi_head, HEADS), (grouped_query, GROUPS))
    @pytest.mark.crossing(every=2)
    def test_scores_of_other_heads_have_other_masks(self, build, layouts):
        seeds = seeds_of_ranks(build, layouts)
        self.assertLen(seeds, 2)
        self.assertLen(set(seeds.values()), 2)


def noisy(rate=RATE, scores=0.0):
    """Dropout where activations are replicated, and of scores."""
    tokens = keras.Input((6,), dtype="int32")
    x = LAYERS.Embedding(24, 24, name="tokens")(tokens)
    y = LAYERS.MultiHeadAttention(
        12, 2, dropout=scores, use_bias=False, name="attention"
    )(x, x, use_causal_mask=True)
    x = LAYERS.Add(name="add")([x, LAYERS.Dropout(rate, name="after")(y)])
    y = LAYERS.Dense(48, activation="gelu", name="up")(x)
    y = LAYERS.Dropout(scores, name="between")(y)
    y = LAYERS.Dense(24, name="down")(y)
    y = LAYERS.GaussianNoise(0.1, name="noise")(y)
    x = LAYERS.Add(name="sum")([x, LAYERS.Dropout(rate, name="last")(y)])
    return keras.Model(tokens, LAYERS.Dense(24, name="logits")(x), name="gpt")


def job(num_rows, **kwargs):
    """With 32 rows no batch is smaller than the others: half the traces."""
    made = jobs.tokens(functools.partial(noisy, **kwargs))
    x, y = made.data["x"][:num_rows], made.data["y"][:num_rows]
    return dataclasses.replace(made, data={**made.data, "x": x, "y": y})


JOB = job(42)
SHARDED = job(42, scores=RATE)


class TrainingTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (32, {}), (42, {}), (42, {"steps_per_execution": 2})
    )
    @pytest.mark.crossing(every=3)
    def test_draws_of_wholes_are_those_of_one_device(self, num_rows, options):
        alone = dataclasses.replace(job(num_rows), compile=dict)
        expected = same_numbers.on_one_device(alone)
        on_ranks = dataclasses.replace(alone, compile=lambda: options)
        same_numbers.assert_same(
            self, expected, same_numbers.on_ranks(on_ranks, 2)
        )

    @pytest.mark.crossing
    def test_draws_of_wholes_in_a_pipeline_are_those_without_ranks(self):
        same_numbers.assert_same(
            self,
            same_numbers.on_mesh(JOB, 2, 2),
            same_numbers.on_mesh(JOB, 2, 2, num_ranks=2),
        )

    @parameterized.parameters(
        lambda: same_numbers.on_ranks(job(32, scores=RATE), 2),
        lambda: same_numbers.on_ranks(SHARDED, 2, 2),
        lambda: same_numbers.on_mesh(SHARDED, 2, 2, num_ranks=2),
    )
    @pytest.mark.crossing
    def test_the_same_seed_gives_the_same_numbers(self, train):
        # To the last bit only without Grappler, which may rewrite the sums of
        # one and the same model in two ways, by how its operations are called.
        set_options = tf.config.optimizer.set_experimental_options
        set_options({"disable_meta_optimizer": True})
        self.addCleanup(set_options, {"disable_meta_optimizer": False})
        first, second = train(), train()
        same_numbers.assert_equal(self, first, second)
        # Seeds have gone on as on one device.
        for path, value in first.variables.items():
            if "seed_generator" in path:
                np.testing.assert_array_equal(value, second.variables[path])
                self.assertNotAllEqual(value, first.initial[path])


if __name__ == "__main__":
    tf.test.main()
