"""Activations sharded along the sequence: as on one device, in parts."""

import dataclasses
import functools
import gc
import itertools
import os
from unittest import mock

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from examples import gpt as examples_gpt
from tests import same_numbers
from tests.layers import same_numbers_test as layer_jobs
from tests.tensor_parallel import backbones
from tests.tensor_parallel import same_numbers_test as jobs
from tfscale.tensor_parallel.propagation import propagation

LAYERS = keras.layers
LENGTH = 8
RANDOM = np.random.RandomState(0)


def tokens(build, vocabulary=24, **kwargs):
    found = RANDOM.randint(0, vocabulary, (24, LENGTH + 1))
    return same_numbers.Job(
        build,
        dict(x=found[:, :-1], y=found[:, 1:], batch_size=8),
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(
            from_logits=True
        ),
        **kwargs,
    )


def backbone(build):
    found = RANDOM.randint(0, 24, (24, LENGTH))
    padding = np.ones_like(found)
    padding[:, -2:] = RANDOM.randint(0, 2, (24, 2))
    return same_numbers.Job(
        build,
        dict(
            x=dict(token_ids=found, padding_mask=padding),
            y=RANDOM.randn(24, LENGTH, 16).astype("float32"),
            batch_size=8,
        ),
    )


def gpt(num_blocks=2, use_bias=True, **options):
    """Pre-norm blocks of plain layers, with positions."""
    heads = dict(use_bias=use_bias, **options)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = LAYERS.Embedding(24, 24, name="tokens")(inputs)
    x = keras_hub.layers.PositionEmbedding(LENGTH, name="positions")(x) + x
    for index in range(num_blocks):
        y = LAYERS.LayerNormalization(name=f"norm_{index}")(x)
        attention = LAYERS.MultiHeadAttention(
            12, 2, name=f"attention_{index}", **heads
        )
        y = attention(y, y, use_causal_mask=True)
        x = LAYERS.Add(name=f"add_{index}")([x, y])
        y = LAYERS.LayerNormalization(name=f"mlp_norm_{index}")(x)
        y = LAYERS.Dense(48, activation="gelu", name=f"up_{index}")(y)
        y = LAYERS.Dense(24, name=f"down_{index}")(y)
        x = LAYERS.Add(name=f"sum_{index}")([x, y])
    x = LAYERS.LayerNormalization(name="final_norm")(x)
    return keras.Model(inputs, LAYERS.Dense(24, name="logits")(x), name="gpt")


# Where one block shows what two would: half as much to trace.
BLOCK = functools.partial(gpt, num_blocks=1, use_bias=False)
LLAMA = functools.partial(backbones.llama, num_layers=2)
GPT2 = functools.partial(backbones.gpt2, num_layers=2, length=LENGTH)


def summarized():
    """What comes after is of the whole sequence: a mean, and another norm."""
    inputs = keras.Input((LENGTH, 12))
    x = LAYERS.Dense(24, activation="relu", name="up")(inputs)
    x = LAYERS.Dense(12, name="down")(x)
    # Its regularizer is of the whole output.
    norm = LAYERS.LayerNormalization(name="norm", activity_regularizer="l2")
    x = norm(x)
    mean = LAYERS.GlobalAveragePooling1D(name="pool")(x)
    # A whole weight on a part, and a layer that mixes along the sequence.
    x = LAYERS.Dense(12, activation="tanh", name="mixed")(x)
    x = LAYERS.Conv1D(12, 3, padding="same", name="mixing")(x)
    x = LAYERS.Add(name="add")([x, LAYERS.RepeatVector(LENGTH)(mean)])
    return keras.Model(inputs, LAYERS.Dense(4, name="out")(x))


def shared_norm():
    """A layer of whole activations, and of parts."""
    inputs = keras.Input((LENGTH, 12))
    norm = LAYERS.LayerNormalization(name="norm")
    x = norm(LAYERS.Dense(12, name="before")(inputs))
    x = LAYERS.Dense(24, activation="relu", name="up")(x)
    x = norm(LAYERS.Dense(12, name="down")(x))
    return keras.Model(inputs, LAYERS.Dense(4, name="out")(x))


def two_lengths():
    """Sharded layers that are called with sequences of two lengths."""
    inputs = keras.Input((LENGTH, 12))
    up = LAYERS.Dense(24, activation="relu", name="up")
    down = LAYERS.Dense(12, name="down")
    long = LAYERS.LayerNormalization(name="norm")(down(up(inputs)))
    short = down(up(LAYERS.Cropping1D((0, LENGTH // 2))(inputs)))
    short = LAYERS.UpSampling1D(2)(short)
    x = LAYERS.Add(name="add")([long, short])
    return keras.Model(inputs, LAYERS.Dense(4, name="out")(x))


def shared_whole_and_half():
    """A layer that needs the whole, once of half as many steps."""
    inputs = keras.Input((LENGTH, 12))
    x = LAYERS.Dense(24, activation="relu", name="up")(inputs)
    x = LAYERS.Dense(12, name="down")(x)
    x = LAYERS.LayerNormalization(name="norm")(x)
    mixing = LAYERS.Conv1D(12, 3, padding="same", name="mixing")
    half = mixing(LAYERS.Cropping1D((0, LENGTH // 2))(inputs))
    x = LAYERS.Add(name="add")([mixing(x), LAYERS.UpSampling1D(2)(half)])
    return keras.Model(inputs, LAYERS.Dense(4, name="out")(x))


def shared_odd():
    """Sharded layers that are called with a length of no parts, too."""
    inputs = keras.Input((LENGTH, 12))
    up = LAYERS.Dense(24, activation="relu", name="up")
    down = LAYERS.Dense(12, name="down")
    x = LAYERS.LayerNormalization(name="norm")(down(up(inputs)))
    odd = down(up(LAYERS.Cropping1D((0, 3))(inputs)))
    x = LAYERS.Add(name="add")([x, LAYERS.ZeroPadding1D((0, 3))(odd)])
    return keras.Model(inputs, LAYERS.Dense(4, name="out")(x))


def shared_output():
    """A layer between others, which also gives the output of the model."""
    inputs = keras.Input((LENGTH, 12))
    up = LAYERS.Dense(24, activation="relu", name="up")
    down = LAYERS.Dense(4, name="down")
    x = LAYERS.LayerNormalization(name="norm")(down(up(inputs)))
    x = LAYERS.Dense(12, name="back")(x)
    return keras.Model(inputs, down(up(x)))


@keras.saving.register_keras_serializable("sequence_test")
class Fixed(LAYERS.Layer):
    """Draws with a seed that is a number."""

    def call(self, x, training=False):
        return keras.random.dropout(x, 0.5, seed=3) if training else x


def noisy():
    """Layers whose draws have to be those of the whole."""
    inputs = keras.Input((LENGTH, 12))
    x = LAYERS.Dense(24, activation="relu", name="up")(inputs)
    x = LAYERS.Dense(12, name="down")(x)
    x = LAYERS.LayerNormalization(name="norm")(x)
    y = LAYERS.GaussianNoise(0.5, name="noise")(x)
    x = LAYERS.Add(name="add")([x, Fixed(name="fixed")(y)])
    x = LAYERS.LayerNormalization(name="last_norm")(x)
    return keras.Model(inputs, LAYERS.Dense(4, name="out")(x))


@keras.saving.register_keras_serializable("sequence_test")
class Composite(LAYERS.Layer):
    """Needs the whole, and has a layer in it that takes the same tensor."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = LAYERS.Dense(12, name="inner")

    def call(self, x):
        return self.inner(x) + keras.ops.mean(x, axis=1, keepdims=True)


def composite():
    inputs = keras.Input((LENGTH, 12))
    x = LAYERS.Dense(24, activation="relu", name="up")(inputs)
    x = LAYERS.Dense(12, name="down")(x)
    x = LAYERS.LayerNormalization(name="norm")(x)
    x = Composite(name="composite")(x)
    return keras.Model(inputs, LAYERS.Dense(4, name="out")(x))


def masked():
    """Its last layer computes a mask of what ranks have a part of."""
    inputs = keras.Input((LENGTH, 12))
    up = LAYERS.Dense(24, activation="relu", use_bias=False, name="up")
    x = LAYERS.Dense(4, use_bias=False, name="down")(up(inputs))
    x = LAYERS.LayerNormalization(center=False, name="norm")(x)
    return keras.Model(inputs, LAYERS.Masking(name="mask")(x))


class Conditioned(keras.Model):
    """Adds what a layer of its own has computed to each time step."""

    def __init__(self):
        super().__init__()
        self.first = LAYERS.Dense(12, activation="tanh", name="first")
        inputs = keras.Input((LENGTH, 12))
        condition = keras.Input((1, 12))
        x = LAYERS.Dense(24, activation="relu", name="up")(inputs)
        x = LAYERS.Dense(12, name="down")(x)
        x = LAYERS.LayerNormalization(name="norm")(x)
        x = LAYERS.Add(name="add")([x, condition])
        x = LAYERS.LayerNormalization(name="last_norm")(x)
        x = LAYERS.Dense(4, name="out")(x)
        self.inner = keras.Model([inputs, condition], x)
        self.first.build((None, 12))
        self.built = True

    def call(self, x):
        return self.inner([x, self.first(x[:, :1])])


def of_vectors(build, num_empty=0):
    """Of the first steps so many are all zero."""
    x = RANDOM.randn(24, LENGTH, 12).astype("float32")
    x[:, :num_empty] = 0.0
    return same_numbers.Job(
        build,
        dict(
            x=x,
            y=RANDOM.randn(24, LENGTH, 4).astype("float32"),
            batch_size=8,
        ),
    )


def example(num_blocks=2):
    return examples_gpt.build_gpt(num_blocks, 24, 4, LENGTH, 0.0)


ADAM = functools.partial(jobs.ADAM, global_clipnorm=0.5)
PAIR = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}
JOBS = {
    "gpt": (tokens(functools.partial(gpt, num_blocks=1)), None),
    "block": (tokens(BLOCK), None),
    "gpt_adam": (
        tokens(functools.partial(gpt, use_bias=False), optimizer=ADAM),
        None,
    ),
    "block_adam": (tokens(BLOCK, optimizer=ADAM), None),
    "example": (tokens(example, 256), None),
    "example_block": (tokens(functools.partial(example, 1), 256), None),
    "llama": (backbone(LLAMA), None),
    "llama_block": (backbone(backbones.llama), None),
    "gpt2": (backbone(GPT2), None),
    "gemma3": (backbone(backbones.gemma3), None),
    "summarized": (of_vectors(summarized), PAIR),
    "shared_norm": (of_vectors(shared_norm), PAIR),
    "mlp": (jobs.JOBS["mlp_sgd"], None),
    "noisy": (of_vectors(noisy), PAIR),
    "composite": (of_vectors(composite), PAIR),
    "conditioned": (of_vectors(Conditioned), PAIR),
    "masked": (of_vectors(masked, num_empty=3), PAIR),
    "two_lengths": (of_vectors(two_lengths), PAIR),
    "shared_whole_and_half": (of_vectors(shared_whole_and_half), PAIR),
    "shared_odd": (of_vectors(shared_odd), PAIR),
    "shared_output": (of_vectors(shared_output), PAIR),
    "explicit": (
        same_numbers.Job(
            layer_jobs.gpt,
            dict(
                x=RANDOM.randint(0, 84, (24, 6)),
                y=RANDOM.randn(24, 6, 84).astype("float32"),
                batch_size=8,
            ),
        ),
        {},
    ),
}
UNMOVED = ("key_bias", "key/bias")


@functools.cache
def one_device(name):
    return same_numbers.on_one_device(JOBS[name][0])


def train(name, ranks, replicas=1, stages=1, zero_stage=0, recompute=False):
    """The outcome, and the model that was split."""
    job, layouts = JOBS[name]
    mesh = tfscale.device_mesh(data=replicas, pipeline=stages, model=ranks)
    layout_map = same_numbers.layout_map_for(job, mesh, layouts)
    same_numbers.reset()
    strategy = tfscale.MeshStrategy(
        mesh, layout_map, zero_stage=zero_stage, sequence_parallel=True
    )
    with strategy.scope():
        outer = model = job.build()
        if stages > 1:
            outer = tfscale.PipelineModel(model, 2, recompute=recompute)
        return same_numbers._train(outer, model, job.optimizer(), job), model


def prepared(name, ranks=2):
    """A model whose plan is there, its strategy, and its inputs."""
    job, layouts = JOBS[name] if isinstance(name, str) else name
    mesh = tfscale.device_mesh(model=ranks)
    layout_map = same_numbers.layout_map_for(job, mesh, layouts)
    same_numbers.reset()
    strategy = tfscale.MeshStrategy(mesh, layout_map, sequence_parallel=True)
    with strategy.scope():
        return job.build(), strategy, job.data["x"]


def graph_of_step(model, strategy, x, backward=True):
    """The graph of a forward, and a backward, on all ranks."""

    def step():
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.square(model(x, training=True)))
        return tape.gradient(y, model.trainable_variables) if backward else y

    run = tf.function(lambda: strategy.run(step), autograph=False)
    return run.get_concrete_function().graph


def sums(graph, features):
    """Lengths of sequences that are added up over ranks."""
    parts, wholes = [], []
    for op in graph.get_operations():
        shape = op.outputs[0].shape if op.outputs else tf.TensorShape(None)
        if op.type != "AddN" or shape.rank != 3 or shape[2] != features:
            continue
        if all(x.op.type == "Split" for x in op.inputs):
            parts.append(shape[1])
        elif len({x.device for x in op.inputs}) == len(op.inputs):
            wholes.append(shape[1])
    return parts, wholes


def plan_of(model):
    ((plan, reason),) = model.sequence_call.found.values()
    assert reason is None, reason
    return plan


class SameNumbersTest(tf.test.TestCase, parameterized.TestCase):
    num_ended = itertools.count(1)

    def tearDown(self):
        super().tearDown()
        # All cases of it leave 2.4 GB of models. It takes half a second,
        # however little there is.
        if next(self.num_ended) % 16 == 0:
            gc.collect()

    @parameterized.parameters(
        ("gpt", 2),
        ("gpt", 4),
        ("block_adam", 2, 2),
        ("example_block", 2),
        ("llama_block", 2),
        ("llama_block", 4),
        ("gpt2", 2, 2),
        ("gemma3", 2),
        ("explicit", 2),
        ("explicit", 3),
        ("summarized", 2),
        ("shared_norm", 2),
        ("noisy", 2),
        ("composite", 2),
        ("masked", 2),
        ("gpt_adam", 2, 2, 2),
        ("gpt2", 2, 1, 2),
        ("block_adam", 2, 2, 1, 1),
        ("gpt2", 2, 1, 2, 0, True),
    )
    @pytest.mark.crossing(every=19)
    def test_of_one_device(self, name, *sizes):
        outcome, model = train(name, *sizes)
        same_numbers.assert_same(
            self, one_device(name), outcome, unmoved=UNMOVED
        )
        self.assertNotEmpty(plan_of(model).scatters)

    @pytest.mark.crossing
    def test_an_input_that_another_layer_has_computed(self):
        # Its gradient was that of a part of the sequence.
        outcome, model = train("conditioned", 2)
        same_numbers.assert_same(self, one_device("conditioned"), outcome)
        self.assertNotEmpty(plan_of(model.inner).scatters)

    @pytest.mark.crossing
    def test_layers_called_with_two_lengths_run_without(self):
        with self.assertWarnsRegex(UserWarning, "'down'.*several lengths"):
            outcome, _ = train("two_lengths", 2)
        same_numbers.assert_same(self, one_device("two_lengths"), outcome)

    @parameterized.parameters("shared_whole_and_half", "shared_output")
    @pytest.mark.crossing(every=2)
    def test_layers_called_in_two_ways_run_without(self, name):
        with self.assertWarnsRegex(UserWarning, "differs on ranks"):
            outcome, _ = train(name, 2)
        same_numbers.assert_same(self, one_device(name), outcome)

    @pytest.mark.crossing
    def test_a_length_of_no_parts_leaves_the_others_sharded(self):
        outcome, model = train("shared_odd", 2)
        same_numbers.assert_same(self, one_device("shared_odd"), outcome)
        self.assertLen(plan_of(model).scatters, 1)

    @pytest.mark.crossing
    def test_in_lower_precision(self):
        # As for sharded layers alone: see the tolerance there.
        keras.config.set_dtype_policy("mixed_bfloat16")
        job, _ = JOBS["block"]
        job = dataclasses.replace(job, optimizer=keras.optimizers.SGD)
        JOBS["mixed"] = job, None
        expected = same_numbers.on_one_device(job)
        outcome, model = train("mixed", 2)
        same_numbers.assert_same(self, expected, outcome, 2.0**-7)
        self.assertNotEmpty(plan_of(model).scatters)


class GraphTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("example_block", 1), ("example", 2), ("gpt2", 2), ("llama", 2)
    )
    @pytest.mark.crossing
    def test_of_residuals_a_rank_has_its_part(self, name, num_blocks):
        model, strategy, x = prepared(name)
        x = keras.tree.map_structure(lambda x: x[:4], x)
        graph = graph_of_step(model, strategy, x, backward=False)
        width = 24 if name.startswith("example") else 16
        norms, adds = [], []
        for op in graph.get_operations():
            shape = op.outputs[0].shape if op.outputs else tf.TensorShape(None)
            if shape.rank == 3 and op.type in ("AddV2", "Mul", "Rsqrt"):
                if "norm" in op.name and shape[2] in (1, width):
                    norms.append(shape[1])
                elif "Gelu" in op.name:
                    continue  # of a part of the features, as many as width
                elif op.type == "AddV2" and shape[2] == width:
                    adds.append(shape[1])
        self.assertEqual(set(norms), {LENGTH // 2})
        # Two norms in each block and one behind them, of two operations or
        # more, on two ranks.
        self.assertGreaterEqual(len(norms), 4 * (2 * num_blocks + 1))
        # Two residuals in each block, on two ranks.
        self.assertEqual(set(adds), {LENGTH // 2})
        self.assertGreaterEqual(len(adds), 4 * num_blocks)

    @parameterized.parameters(("example_block", 1), ("example", 2))
    @pytest.mark.crossing(every=2)
    def test_sums_are_of_parts_where_they_were_of_wholes(
        self, name, num_blocks
    ):
        model, strategy, x = prepared(name)
        graph = graph_of_step(model, strategy, x[:4])
        # Each sum makes a rank's part: forward behind embedding, attention
        # and MLP of each block, backward before each attention, MLP and
        # the logits, on two ranks.
        num_sums = 2 * (4 * num_blocks + 2)
        self.assertEqual(sums(graph, 24), ([LENGTH // 2] * num_sums, []))

    def test_without_it_sums_are_of_wholes(self):
        job, _ = JOBS["example_block"]
        mesh = tfscale.device_mesh(model=2)
        layout_map = same_numbers.layout_map_for(job, mesh)
        same_numbers.reset()
        strategy = tfscale.MeshStrategy(mesh, layout_map)
        with strategy.scope():
            model = job.build()
        graph = graph_of_step(model, strategy, job.data["x"][:4])
        parts, wholes = sums(graph, 24)
        self.assertEmpty(parts)
        self.assertEqual(set(wholes), {LENGTH})


class SearchTest(tf.test.TestCase):
    @pytest.mark.crossing
    def test_a_deep_model_takes_no_more_passes(self):
        # A pass ended at the first layer that gathers, and a model of 25
        # blocks was given up after 100 of them.
        passes = []
        for num_blocks in (1, 2):
            model, _, x = prepared(
                (tokens(functools.partial(gpt, num_blocks)), None)
            )
            with mock.patch.object(
                propagation, "Walk", wraps=propagation.Walk
            ) as walk:
                model.predict(x[:8], verbose=0)
            self.assertNotEmpty(plan_of(model).scatters)
            passes.append(walk.call_count)
        self.assertEqual(*passes)


def dropped(rate):
    return examples_gpt.build_gpt(1, 24, 4, LENGTH, rate)


class DrawsTest(tf.test.TestCase):
    def test_masks_of_the_parts_are_each_ranks_own(self):
        model, strategy, x = prepared(
            (tokens(functools.partial(dropped, 0.3), 256), None)
        )
        graph = graph_of_step(model, strategy, x[:4])
        seeds = {
            op.name: op.inputs[0]
            for op in graph.get_operations()
            if op.type == "StatelessRandomGetKeyCounter"
            and "stateless_dropout" in op.name
        }
        folded = [
            any(
                inner.op.type == "StatelessRandomUniformFullIntV2"
                for inner in _ancestors(seed)
            )
            for seed in seeds.values()
        ]
        # After attention and after the MLP, on two ranks.
        self.assertEqual(folded, [True] * 4)
        self.assertLen(plan_of(model).sharded_generators, 2)

    @pytest.mark.crossing
    def test_the_same_seed_gives_the_same_numbers(self):
        JOBS["dropped"] = tokens(functools.partial(dropped, 0.3), 256), None
        first, second = (train("dropped", 2)[0] for _ in range(2))
        same_numbers.assert_equal(self, first, second)


def _ancestors(tensor):
    found, stack = set(), [tensor]
    while stack:
        tensor = stack.pop()
        if tensor.ref() not in found:
            found.add(tensor.ref())
            yield tensor
            stack += tensor.op.inputs


class UseTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters({}, {"run_eagerly": True})
    @pytest.mark.crossing
    def test_methods_of_a_model(self, **options):
        job, _ = JOBS["block"]
        x, y = job.data["x"], job.data["y"]

        def results(model):
            model.compile("sgd", job.loss(), **options)
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
            return [
                model.evaluate(x, y, batch_size=8, verbose=0),
                model.predict(x, batch_size=8, verbose=0),
                *model.get_weights(),
            ]

        same_numbers.reset()
        expected = results(BLOCK())
        model, strategy, _ = prepared("block")
        with strategy.scope():
            found = results(model)
        self.assertNotEmpty(plan_of(model).scatters)
        for one, other in zip(expected, found, strict=True):
            same_numbers.assert_close(other, one)

    @pytest.mark.crossing
    def test_frozen_norms_are_thawed(self):
        # A part of the sequence was all that their gradients saw.
        job, _ = JOBS["composite"]

        def train(model):
            for trainable in (False, True):
                for layer in model.layers:
                    if isinstance(layer, LAYERS.LayerNormalization):
                        layer.trainable = trainable
                model.compile(keras.optimizers.SGD(0.1), job.loss())
                model.fit(**job.data, shuffle=False, verbose=0)
            return model.get_weights()

        same_numbers.reset()
        expected = train(composite())
        model, strategy, _ = prepared("composite")
        with strategy.scope():
            found = train(model)
        for one, other in zip(expected, found, strict=True):
            same_numbers.assert_close(other, one)

    @pytest.mark.crossing
    def test_each_model_of_a_scope_has_a_plan(self):
        # The second one ran without, and without a word.
        strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(model=2), PAIR, sequence_parallel=True
        )
        with strategy.scope():
            models = [shared_norm(), shared_norm()]
        for model in models:
            model.predict(np.zeros((2, LENGTH, 12)), verbose=0)
            self.assertNotEmpty(plan_of(model).scatters)

    def test_a_length_that_ranks_do_not_divide(self):
        model, strategy, x = prepared("llama_block")
        with strategy.scope():
            model.compile("sgd", "mse")
        odd = {name: value[:, :7] for name, value in x.items()}
        with self.assertWarnsRegex(
            UserWarning, "of 7 cannot be sharded over 2 ranks. Use 6 or 8"
        ):
            found = model.predict(odd, batch_size=8, verbose=0)
        same_numbers.reset()
        expected = backbones.llama().predict(odd, batch_size=8, verbose=0)
        same_numbers.assert_close(found, expected)

    @pytest.mark.crossing
    def test_what_is_saved_is_a_plain_model(self):
        model, strategy, x = prepared("block")
        with strategy.scope():
            model.compile("sgd", "mse")
        expected = model.predict(x, batch_size=8, verbose=0)
        self.assertNotEmpty(plan_of(model).scatters)
        path = os.path.join(self.get_temp_dir(), "model.keras")
        model.save(path)
        same_numbers.reset()
        loaded = keras.models.load_model(path)
        for one, other in zip(
            model.get_weights(), loaded.get_weights(), strict=True
        ):
            np.testing.assert_array_equal(one, other)
        found = loaded.predict(x, batch_size=8, verbose=0)
        same_numbers.assert_close(found, expected)

    @pytest.mark.crossing
    def test_two_lengths_have_a_plan_each(self):
        model, strategy, x = prepared("llama_block")
        run = tf.function(
            lambda x: strategy.run(model, args=(x,)), autograph=False
        )
        whole = run({name: value[:4] for name, value in x.items()})
        part = run({name: value[:4, :4] for name, value in x.items()})
        # Attention is causal: what comes later changes nothing.
        same_numbers.assert_close(part, whole[:, :4])
        sizes = [
            set(plan.scatters.values())
            for plan, _ in model.sequence_call.found.values()
        ]
        self.assertEqual(sizes, [{LENGTH}, {4}])

    def test_a_model_without_such_sums_is_told(self):
        with self.assertWarnsRegex(
            UserWarning, "'mlp' runs without.*no layer adds up"
        ):
            train("mlp", 2)

    def test_what_is_no_graph_runs_eagerly_with_whole_activations(self):
        # It was passed over in silence that nothing had been prepared.
        model, strategy, x = prepared("mlp")

        def step():
            # In the trial run, which is a graph, there is no such number.
            return model(x[: int(tf.constant(4).numpy())])

        with self.assertWarnsRegex(UserWarning, "needs a graph"):
            found = strategy.experimental_local_results(strategy.run(step))[0]
        same_numbers.assert_close(found, model(x[:4]))

    def test_a_model_with_a_call_of_its_own_runs_without(self):
        # The warning was promised, and never came.
        class Model(keras.Model):
            def __init__(self):
                super().__init__(name="own")
                self.up = LAYERS.Dense(8, name="up")
                self.down = LAYERS.Dense(4, name="down")

            def call(self, x):
                return self.down(self.up(x))

        layouts = {
            "own/up/kernel": (None, "model"),
            "own/down/kernel": ("model", None),
        }
        strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(model=2), layouts, sequence_parallel=True
        )
        x = RANDOM.randn(2, LENGTH, 4).astype("float32")
        with strategy.scope():
            model = Model()
            expected = model(x)
        with self.assertWarnsRegex(
            UserWarning, "'own' runs without sequence parallelism"
        ) as caught:
            found = model.predict(x, verbose=0)
        self.assertLen(caught.warnings, 1)
        same_numbers.assert_close(found, expected)

    def test_the_summary_shows_what_is_exchanged(self):
        model, _, _ = prepared("example_block")
        lines = []
        tfscale.sharding_summary(model, 140, lines.append)
        text = lines[0]
        self.assertIn("reduce-scatter of the output", text)
        self.assertIn("all-reduce of the weights' gradients", text)
        self.assertNotIn("all-reduce of the output", text)
        self.assertRegex(
            " ".join(text.split()),
            r"Along the sequence a device has 4 of 8 positions in: .*"
            r"block_0_mlp_norm.*block_0_mlp_dropout, block_0_mlp_add",
        )


if __name__ == "__main__":
    tf.test.main()
