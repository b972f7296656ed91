"""Replicas that divide weights (ZeRO stage 3): the numbers of one device."""

import collections
import contextlib
import dataclasses
import functools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.tensor_parallel import optimizer_test
from tests.tensor_parallel import same_numbers_test
from tests.variables import zero_test
from tfscale.adapters.optimizer import MeshOptimizer
from tfscale.variables import weight_gather
from tfscale.variables import zero

layers = keras.layers
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 40, size=(24, 8))
VECTORS = RNG.normal(size=(24, 8, 16)).astype("float32")
PICTURES = RNG.normal(size=(24, 8, 8, 4)).astype("float32")


def gpt(num_blocks=1):
    """Tied embeddings: used first and last."""
    table = layers.ReversibleEmbedding(40, 16, name="table")
    inputs = keras.Input((8,), dtype="int32")
    x = table(inputs)
    for i in range(num_blocks):
        h = layers.LayerNormalization(name=f"norm_{i}")(x)
        # Biases of keys have no gradient but rounding errors.
        x += layers.MultiHeadAttention(2, 8, use_bias=False, name=f"mha_{i}")(
            h, h, use_causal_mask=True
        )
        h = layers.LayerNormalization(name=f"norm_{i}_mlp")(x)
        h = layers.Dense(32, "gelu", name=f"up_{i}")(h)
        x += layers.Dense(16, name=f"down_{i}")(h)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(inputs, table(x, reverse=True))


def mlp(depth=3, **kwargs):
    hidden = [
        layers.Dense(32, "relu", name=f"dense_{i}", **kwargs)
        for i in range(depth)
    ]
    return keras.Sequential(
        [keras.Input((8, 16)), *hidden, layers.Dense(1, name="end", **kwargs)]
    )


def recurrent():
    return keras.Sequential(
        [
            keras.Input((8, 16)),
            layers.LSTM(16, return_sequences=True, name="lstm"),
            layers.GRU(16, name="gru"),
            layers.Dense(1, name="end"),
        ]
    )


def convolutions():
    return keras.Sequential(
        [
            keras.Input((8, 8, 4)),
            layers.Conv2D(16, 3, activation="relu", name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.SeparableConv2D(16, 3, activation="silu", name="separable"),
            # It reads and assigns its kernel in a branch.
            layers.SpectralNormalization(
                layers.Conv2D(8, 2, name="last"), name="spectral"
            ),
            layers.Flatten(name="flat"),
            layers.Dense(1, name="end"),
        ]
    )


def shared():
    """One layer, used three times."""
    inputs = keras.Input((8, 16))
    layer, x = layers.Dense(16, "tanh", name="shared"), inputs
    for _ in range(3):
        x = layer(x)
    return keras.Model(inputs, layers.Dense(1, name="end")(x))


class Recomputed(layers.Layer):
    """Computed again in the backward, which reads its weights anew."""

    def __init__(self, layer, **kwargs):
        super().__init__(**kwargs)
        self.inner = layer

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return keras.remat(self.inner.call)(x)


def recomputed():
    hidden = [
        Recomputed(layers.Dense(16, "tanh", name=f"dense_{i}"), name=f"re_{i}")
        for i in range(3)
    ]
    return keras.Sequential(
        [keras.Input((8, 16)), *hidden, layers.Dense(1, name="end")]
    )


class Penalty(keras.Model):
    """A `train_step` of its own: a gradient inside of the loss."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                out = self(x, training=True)
            slope = inner.gradient(out, x)
            loss = self.compute_loss(y=y, y_pred=out)
            count = tf.distribute.get_strategy().num_replicas_in_sync
            loss += tf.reduce_mean(tf.square(slope)) / count
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class Vectorized(keras.Model):
    """A `train_step` with loops that TensorFlow vectorizes."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                out = self(x, training=True)
            slopes = inner.batch_jacobian(out, x)
            mapped = tf.vectorized_map(lambda row: self(row[None])[0], x)
            loss = self.compute_loss(y=y, y_pred=out + mapped)
            count = tf.distribute.get_strategy().num_replicas_in_sync
            loss += tf.reduce_mean(tf.square(slopes)) / count
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def vectorized():
    x = inputs = keras.Input((16,))
    for i in range(2):
        x = layers.Dense(16, "tanh", name=f"dense_{i}")(x)
    return Vectorized(inputs, layers.Dense(1, name="end")(x))


def penalised():
    x = inputs = keras.Input((8, 16))
    for i in range(2):
        x = layers.Dense(32, "tanh", name=f"dense_{i}")(x)
    return Penalty(inputs, layers.Dense(1, name="end")(x))


class Centring(layers.Layer):
    """Sums over replicas, and adds a loss."""

    def call(self, x):
        mean = keras.ops.mean(x, axis=0)
        replica = tf.distribute.get_replica_context()
        if replica is not None:
            mean = replica.all_reduce("MEAN", mean)
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x - mean


def adding(*between):
    x = inputs = keras.Input((8, 16))
    x = layers.Dense(32, activity_regularizer="l2", name="dense_0")(x)
    for layer in between:
        x = layer()(x)
    x = layers.Dense(32, activity_regularizer="l1", name="dense_1")(x)
    return keras.Model(inputs, layers.Dense(1, name="end")(x))


def frozen():
    model = mlp()
    model.layers[1].trainable = False
    return model


def adapted():
    model = mlp()
    for layer in model.layers[:2]:
        layer.enable_lora(4)
    return model


def quantized():
    model = mlp()
    for layer in model.layers[:2]:
        layer.quantize("int8")
        layer.enable_lora(4)
    return model


def job(build, x=VECTORS, y=None, **kwargs):
    y = np.full((len(x), 8, 1), x.mean(), "float32") if y is None else y
    kwargs.setdefault("optimizer", lambda: keras.optimizers.Adam(1e-3))
    data = {"x": x, "y": y, "batch_size": 8}
    return same_numbers.Job(build=build, data=data, **kwargs)


def one_output(x):
    return np.full((len(x), 1), x.mean(), "float32")


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


TIED = job(gpt, TOKENS, TOKENS, loss=cross_entropy)
JOBS = {
    "tied": TIED,
    "clipped": dataclasses.replace(
        TIED,
        optimizer=lambda: keras.optimizers.Adam(1e-3, global_clipnorm=0.1),
    ),
    "accumulated": dataclasses.replace(
        TIED,
        fit={"callbacks": [tfscale.callbacks.GradientAccumulation(2)]},
    ),
    "recurrent": job(recurrent, y=one_output(VECTORS)),
    "convolutions": job(convolutions, PICTURES, one_output(PICTURES)),
    "shared": job(shared),
    "recomputed": job(recomputed),
    "penalised": job(penalised),
    "vectorized": job(vectorized, VECTORS[:, 0], one_output(VECTORS)),
    "frozen": job(frozen),
    # Kernels of zeros, whose first gradients are small.
    "adapted": job(
        adapted, optimizer=lambda: keras.optimizers.Adam(1e-3, epsilon=1e-3)
    ),
    "quantized": job(quantized),
    "averaged": job(
        mlp,
        optimizer=lambda: keras.optimizers.AdamW(
            1e-3, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=2
        ),
    ),
    "constrained": job(
        functools.partial(
            mlp, kernel_regularizer="l2", kernel_constraint="max_norm"
        )
    ),
    "several_steps": job(mlp, compile=lambda: {"steps_per_execution": 3}),
    "eager": job(mlp, compile=lambda: {"run_eagerly": True}),
    "bfloat16": job(functools.partial(mlp, dtype="mixed_bfloat16")),
    "scaled": job(
        functools.partial(mlp, dtype="mixed_float16"),
        optimizer=lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(1e-3), initial_scale=1024.0
        ),
    ),
    # Rows that two replicas do not divide, and a last batch of one.
    "uneven": dataclasses.replace(
        job(mlp),
        data={"x": VECTORS[:17], "y": VECTORS[:17, :, :1], "batch_size": 8},
    ),
}
# In these the sums over replicas are added up in another order than in stage
# 0, or a gradient is the sum of several.
ROUNDED = (
    *("tied", "clipped", "accumulated", "shared", "vectorized"),
    *("constrained", "uneven"),
)
# A replica that computes in half precision rounds what it sums over its rows.
HALF = {"bfloat16": 4.5 * 2.0**-7, "scaled": 4.5 * 2.0**-10}
# BatchNormalization normalizes by the rows of a replica.
NOT_OF_ONE_DEVICE = ("convolutions",)


@contextlib.contextmanager
def small_weights_divided(elements=64):
    with mock.patch.object(zero, "MIN_ELEMENTS", elements):
        yield


def train(job, stage, data=2, **kwargs):
    with small_weights_divided():
        return same_numbers.on_zero(job, data, zero_stage=stage, **kwargs)


def divided(model):
    return [
        v.path
        for v in model.trainable_variables
        if v.value.sharding.data_dim is not None
    ]


class SameNumbersTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*JOBS)
    @pytest.mark.crossing(every=20)
    def test_of_one_device_and_of_replicas_that_have_all_weights(self, name):
        outcome = train(JOBS[name], 3)
        self.assertNotEmpty(divided(outcome.model))
        if name not in NOT_OF_ONE_DEVICE:
            whole_batch = dataclasses.replace(JOBS[name], fit={})
            expected = same_numbers.on_one_device(whole_batch)
            rtol = HALF.get(name, same_numbers.RTOL)
            same_numbers.assert_same(self, expected, outcome, rtol)
        if name not in ROUNDED:
            with same_numbers.calls_of_each_replica():
                whole = train(JOBS[name], 0)
            self.assertEqual(divided(whole.model), [])
            same_numbers.assert_equal(self, whole, outcome)

    @parameterized.parameters("adam", "clipnorm", "loss_scale", "odd")
    @pytest.mark.crossing
    def test_of_one_device_with_each_optimizer(self, name):
        job = zero_test.JOBS[name]
        expected = zero_test.one_device(name)
        same_numbers.assert_same(self, expected, train(job, 3))

    @parameterized.parameters(4, 3)
    @pytest.mark.crossing
    def test_of_one_device_on_more_replicas(self, data):
        job = zero_test.JOBS["adam"]
        job = dataclasses.replace(job, data={**job.data, "batch_size": 12})
        expected = same_numbers.on_one_device(job)
        same_numbers.assert_same(self, expected, train(job, 3, data))

    @parameterized.parameters(*zero_test.ON_RANKS, "block_adam")
    @pytest.mark.crossing
    def test_of_one_device_with_model_ranks(self, name):
        job, layouts = zero_test.JOBS.get(name), optimizer_test.LAYOUTS
        if name == "block_adam":  # with attention
            job, layouts = same_numbers_test.JOBS[name], None
        outcome = train(job, 3, model=2, layouts=layouts)
        self.assertNotEmpty(divided(outcome.model))
        same_numbers.assert_same(self, zero_test.one_device(name), outcome)

    @parameterized.parameters((3, Centring), (3,), (0, Centring))
    @pytest.mark.crossing(every=3)
    def test_of_losses_that_layers_add(self, stage, *between):
        # Replicas that meet in a layer logged the losses of one another.
        added = job(functools.partial(adding, *between))
        same_numbers.assert_same(
            self, same_numbers.on_one_device(added), train(added, stage)
        )


class TwoOptimizers(keras.Model):
    """As a GAN has them: each updates weights that the other's loss reads."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(16, "tanh", name="first")
        self.second = layers.Dense(16, name="second")

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x):
        return self.second(self.first(x))

    def compile(self):
        super().compile(loss="mse")
        self.one = keras.optimizers.Adam(1e-2)
        self.two = keras.optimizers.Adam(1e-2)
        self.one.build(self.first.trainable_variables)
        self.two.build(self.second.trainable_variables)

    def train_step(self, data):
        x, y = data
        for optimizer, layer in (
            (self.one, self.first),
            (self.two, self.second),
        ):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            variables = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class OwnLoopTest(tf.test.TestCase, parameterized.TestCase):
    def test_an_update_takes_a_jacobian_of_divided_weights(self):
        # It is whole, and summed where it is applied.
        def train(stage):
            same_numbers.reset()
            strategy = tfscale.MeshStrategy(
                tfscale.device_mesh(data=2), zero_stage=stage
            )
            with strategy.scope(), small_weights_divided():
                model = mlp(1)
                optimizer = keras.optimizers.SGD()
                optimizer.build(model.trainable_variables)

            def step():
                variables = model.trainable_variables
                with tf.GradientTape() as tape:
                    y = tf.reduce_sum(model(VECTORS[:2]), [1, 2])
                rows = tape.jacobian(y, variables)
                optimizer.apply([row[0] + row[1] for row in rows], variables)

            tf.function(lambda: strategy.run(step), autograph=False)()
            return model.get_weights()

        self.assertAllClose(train(3), train(0), rtol=1e-5, atol=1e-6)

    @pytest.mark.crossing
    def test_two_optimizers_in_one_step(self):
        def train(stage):
            same_numbers.reset()
            strategy = tfscale.MeshStrategy(
                tfscale.device_mesh(data=2), zero_stage=stage
            )
            with strategy.scope(), small_weights_divided():
                model = TwoOptimizers()
                model.build((None, 16))
                model.compile()
            model.fit(VECTORS[:, 0], VECTORS[:, 1], batch_size=8, verbose=0)
            return model

        one, other = train(0), train(3)
        self.assertLen(divided(other), 2)
        for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)

    @parameterized.parameters(False, True)
    @pytest.mark.crossing(every=2)
    def test_a_loop_by_hand(self, autograph):
        def train(strategy):
            same_numbers.reset()
            with strategy.scope(), small_weights_divided():
                model = mlp(1)
                optimizer = keras.optimizers.Adam(1e-2)
                optimizer.build(model.trainable_variables)

            def step(x):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.square(model(x) - 1.0)) / 64
                variables = model.trainable_variables
                optimizer.apply(tape.gradient(loss, variables), variables)

            run = tf.function(
                lambda x: strategy.run(step, args=(x,)), autograph=autograph
            )
            data = tf.data.Dataset.from_tensor_slices(VECTORS).batch(8)
            for batch in strategy.experimental_distribute_dataset(data):
                run(batch)
            return model.get_weights()

        expected = train(tf.distribute.get_strategy())
        mesh = tfscale.device_mesh(data=2)
        actual = train(tfscale.MeshStrategy(mesh, zero_stage=3))
        for one, other in zip(expected, actual, strict=True):
            same_numbers.assert_close(other, one)


TRACED = {
    "deep": job(functools.partial(mlp, depth=6)),
    "penalised": JOBS["penalised"],
    "tied": dataclasses.replace(
        TIED, build=functools.partial(gpt, num_blocks=2)
    ),
}


@functools.cache
def step_graph(name, stage=3):
    """The graph of a step and all gathers: gate, whole, and the limit."""
    job = TRACED[name]
    same_numbers.reset()
    mesh = tfscale.device_mesh(data=2)
    strategy = tfscale.MeshStrategy(mesh, zero_stage=stage)
    with strategy.scope(), small_weights_divided():
        model = job.build()
        model.compile(job.optimizer(), job.loss())
        model.optimizer.build(model.trainable_variables)
    x, y = (tf.constant(job.data[key][:8]) for key in "xy")
    step = tf.function(
        lambda x, y: strategy.run(model.train_step, args=((x, y),)),
        autograph=False,  # as in `fit`
    )
    gathers = []
    with noted_gathers(gathers):
        graph = step.get_concrete_function(x, y).graph
    return graph, gathers, strategy.extended.optimizer_states


class GraphTest(tf.test.TestCase, parameterized.TestCase):
    def test_nothing_of_the_backward_reads_a_first_gather(self):
        """But for those of the last layer, which are kept."""
        _, gathers, _ = step_graph("deep")
        in_backward = [
            "sequential" in gate.name
            for gate, whole in gathers
            if any(weight_gather.BACKWARD in op.name for op in uses_of(whole))
        ]
        # On 2 replicas: 6 kernels, of which the backward needs 5.
        self.assertLen(gathers, 2 * (6 + 3))
        self.assertEqual(collections.Counter(in_backward), {True: 4, False: 6})

    def test_a_step_has_few_more_operations(self):
        """Each takes time, in the first step most of all."""
        # Not of the update, which replicas with whole slots trace once.
        with mock.patch.object(MeshOptimizer, "_backend_update_step"):
            graph, gathers, _ = step_graph.__wrapped__("deep")
            whole, _, _ = step_graph.__wrapped__("deep", 0)
        more = len(graph.get_operations()) - len(whole.get_operations())
        # A gather: the gate, the concatenation, its dim.
        self.assertLessEqual(more, 3 * len(gathers))

    @pytest.mark.crossing
    def test_microbatches_gather_again_in_their_loop(self):
        """Of 6 kernels the backward of a microbatch has 2, and needs 5."""
        noted, deep = [], job(functools.partial(mlp, depth=6))
        with noted_gathers(noted):
            train(dataclasses.replace(deep, fit=JOBS["accumulated"].fit), 3)
        # Before the loop a forward says what losses are divided by. It needs
        # no weight, and TensorFlow leaves its gathers out.
        gathers = [
            (gate, whole)
            for gate, whole in noted
            if gate.graph.name.startswith("while_body")
        ]
        self.assertLen(gathers, 2 * (6 + 3))
        in_backward = [
            "sequential" in gate.name
            for gate, whole in gathers
            if any(weight_gather.BACKWARD in op.name for op in uses_of(whole))
        ]
        self.assertEqual(collections.Counter(in_backward), {True: 4, False: 6})

    @parameterized.parameters(*TRACED)
    @pytest.mark.crossing(every=3)
    def test_no_more_is_alive_in_whatever_order_operations_run(self, name):
        graph, gathers, states = step_graph(name)
        operations = graph.get_operations()
        for most in most_alive(operations, gathers, range(20)):
            self.assertLen(most, 2)
            for num_bytes in most.values():
                self.assertLessEqual(num_bytes, states.max_gathered_bytes)


@contextlib.contextmanager
def noted_gathers(gathers):
    """Appends the gate and the whole weight of each gather that is traced."""

    def note(waits, shard, dim):
        gathers.append(gather_after(waits, shard, dim))
        return gathers[-1]

    gather_after = weight_gather.gather_after
    with mock.patch.object(weight_gather, "gather_after", note):
        yield


def uses_of(whole):
    """What computes with a gathered weight, or with what a tape is given."""
    found = []
    for op, _ in weight_gather.uses(whole):
        # Of a custom gradient: the result, then the arguments.
        again = op.type == "IdentityN" and op.inputs[0] is whole
        found += uses_of(op.outputs[0]) if again else [op]
    return found


def most_alive(operations, gathers, seeds):
    """Of each of some orders: the most bytes of gathered weights, by device."""
    waits_for, followers = {}, {}
    for op in operations:
        waits_for[op] = {x.op for x in op.inputs} | set(op.control_inputs)
        for other in waits_for[op]:
            followers.setdefault(other, []).append(op)
    started, used_by = {}, {}
    for gate, whole in gathers:
        size = whole.shape.num_elements() * whole.dtype.size
        if uses := set(uses_of(whole)):  # else it is pruned
            started[gate.op] = gate.device, size, len(uses)
        for use in uses:
            used_by.setdefault(use, []).append(gate.op)
    for seed in seeds:
        chance, most, now = np.random.default_rng(seed), {}, {}
        num_waits = {op: len(waits_for[op]) for op in operations}
        num_uses = {gate: uses for gate, (_, _, uses) in started.items()}
        ready = [op for op in operations if not waits_for[op]]
        for _ in operations:
            op = ready.pop(int(chance.integers(len(ready))))
            for gate in used_by.get(op, ()):
                num_uses[gate] -= 1
                if not num_uses[gate]:
                    now[started[gate][0]] -= started[gate][1]
            if op in started:
                device, size, _ = started[op]
                now[device] = now.get(device, 0) + size
                most[device] = max(most.get(device, 0), now[device])
            for other in followers.get(op, ()):
                num_waits[other] -= 1
                if not num_waits[other]:
                    ready.append(other)
        yield most


class VariablesTest(tf.test.TestCase, parameterized.TestCase):
    def model(self, stage=3, data=2, build=mlp, layouts=None):
        same_numbers.reset()
        strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(data=data), layouts, zero_stage=stage
        )
        with strategy.scope(), small_weights_divided():
            model = build()
            model.compile(keras.optimizers.SGD(1e-2, 0.9), "mse")
        return model

    def test_a_device_has_its_part_of_weights_and_slots(self):
        model = self.model()
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
        kernel = model.layers[1].kernel
        self.assertEqual(kernel.shape, (32, 32))
        for variable in (kernel, *model.optimizer.variables[2:]):
            if tuple(variable.shape) == (32, 32):
                for component in variable.value.values:
                    self.assertEqual(component.shape, (16, 32))
        bias = model.layers[1].bias
        self.assertEqual(bias.value.values[0].shape, (32,))

    def test_what_fit_builds_is_divided(self):
        """Each replica had all of it, as the creator knew no layer."""

        def left_to_fit():
            return keras.Sequential([layers.Dense(32), layers.Dense(1)])

        def fit(model):
            y = VECTORS[:8, :, :1]
            model.fit(VECTORS[:8], y, batch_size=8, epochs=2, verbose=0)
            return model.get_weights()

        model = self.model(build=left_to_fit)
        with self.assertRaisesRegex(
            ValueError, "needs weights that it can divide"
        ):
            fit(model)  # none of them has 4,096 elements
        model = self.model(build=left_to_fit)
        with small_weights_divided():
            found = fit(model)
        for component in model.layers[0].kernel.value.values:
            self.assertEqual(component.shape, (8, 32))
        same_numbers.reset()
        plain = left_to_fit()
        plain.compile(keras.optimizers.SGD(1e-2, 0.9), "mse", run_eagerly=True)
        for one, other in zip(fit(plain), found, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

    def test_an_error_names_the_largest_weight_that_trains(self):
        """It named the first variable, here a mean that does not train."""
        same_numbers.reset()
        mesh = tfscale.device_mesh(data=2)
        with tfscale.MeshStrategy(mesh, zero_stage=3).scope():
            model = keras.Sequential(
                [
                    keras.Input((8,)),
                    layers.Normalization(mean=0.0, variance=1.0),
                    layers.BatchNormalization(),
                    layers.Dense(8, name="frozen", trainable=False),
                    layers.Dense(4, name="trained"),
                ]
            )
            model.compile("sgd", "mse")
        with self.assertRaisesRegex(ValueError, "4 variables.*trained/kernel"):
            model.fit(np.ones((4, 8)), np.ones((4, 4)), verbose=0)

    def test_small_weights_stay_whole_with_their_slots(self):
        same_numbers.reset()
        mesh = tfscale.device_mesh(data=2)
        with tfscale.MeshStrategy(mesh, zero_stage=3).scope():
            model = keras.Sequential(
                [keras.Input((32,)), keras.layers.Dense(128)]
            )
            model.compile(keras.optimizers.Adam(1e-2), "mse")
            model.optimizer.build(model.trainable_variables)
        shapes = {
            tuple(variable.shape): {
                tuple(component.shape) for component in variable.value.values
            }
            for variable in (*model.variables, *model.optimizer.variables[2:])
        }
        self.assertEqual(shapes, {(32, 128): {(16, 128)}, (128,): {(128,)}})

    def test_no_weight_is_read_to_know_how_its_slots_are_sharded(self):
        model = self.model()
        strategy, kernel = (
            model.distribute_strategy,
            model.layers[1].kernel.value,
        )
        states = strategy.extended.optimizer_states
        with (
            strategy.scope(),
            mock.patch.object(type(kernel), "_whole") as whole,
        ):
            self.assertEqual(states.dim_of(kernel), 0)
        whole.assert_not_called()

    def test_values_are_whole_from_outside(self):
        plain = mlp()
        model = self.model()
        model.set_weights(plain.get_weights())
        for one, other in zip(plain.weights, model.weights, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
        np.testing.assert_allclose(
            model.predict(VECTORS, verbose=0),
            plain(VECTORS),
            rtol=1e-5,
            atol=1e-6,
        )
        plain.compile("sgd", "mse", run_eagerly=True)
        np.testing.assert_allclose(
            model.evaluate(VECTORS, VECTORS[:, :, :1], verbose=0),
            plain.evaluate(VECTORS, VECTORS[:, :, :1], verbose=0),
            rtol=1e-5,
        )
        model.layers[0].kernel.assign(plain.layers[0].kernel * 2.0)
        np.testing.assert_array_equal(
            model.layers[0].kernel.numpy(), plain.layers[0].kernel.numpy() * 2
        )

    @parameterized.parameters("model.keras", "model.weights.h5")
    @pytest.mark.crossing(every=2)
    def test_what_is_saved_loads_in_plain_keras(self, name):
        model = self.model()
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
        for variable in model.optimizer.variables[2:]:
            variable.assign(keras.random.normal(variable.shape))
        path = self.get_temp_dir() + "/" + name
        if name.endswith(".keras"):
            model.save(path)
            loaded = keras.models.load_model(path)
            slots = zip(model.optimizer.variables, loaded.optimizer.variables)
            for one, other in slots:
                np.testing.assert_array_equal(np.array(one), np.array(other))
        else:
            model.save_weights(path)
            loaded = mlp()
            loaded.load_weights(path)
        for one, other in zip(
            model.get_weights(), loaded.get_weights(), strict=True
        ):
            np.testing.assert_array_equal(one, other)

    @parameterized.parameters(True, False)
    def test_what_plain_keras_has_saved_is_loaded(self, is_in_scope):
        plain, model = mlp(), self.model()
        path = self.get_temp_dir() + "/plain.weights.h5"
        plain.compile(keras.optimizers.Adam(1e-2), "mse")
        plain.save_weights(path)
        strategy = model.distribute_strategy
        with strategy.scope() if is_in_scope else contextlib.nullcontext():
            model.load_weights(path)
        for one, other in zip(plain.weights, model.weights, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
        self.assertNotEmpty(divided(model))

    @pytest.mark.crossing
    def test_early_stopping_restores_the_best_weights(self):
        def train(stage):
            model = self.model(stage)
            stop = keras.callbacks.EarlyStopping(
                "loss", mode="max", patience=1, restore_best_weights=True
            )
            model.fit(
                VECTORS,
                VECTORS[:, :, :1],
                batch_size=8,
                epochs=4,
                shuffle=False,
                callbacks=[stop],
                verbose=0,
            )
            self.assertEqual(stop.best_epoch, 0)
            return model.get_weights()

        for one, other in zip(train(0), train(3), strict=True):
            np.testing.assert_array_equal(one, other)

    @pytest.mark.crossing
    def test_a_callback_assigns_in_the_middle_of_an_epoch(self):
        class Halved(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 1:
                    for variable in self.model.trainable_variables:
                        variable.assign(variable * 0.5)

        def train(model):
            data = {"batch_size": 8, "shuffle": False, "verbose": 0}
            model.fit(VECTORS, VECTORS[:, :, :1], callbacks=[Halved()], **data)
            return model.get_weights()

        small = functools.partial(mlp, 1)
        models = self.model(3, build=small), self.model(0, build=small)
        alone = small()
        alone.set_weights(models[1].get_weights())
        alone.compile(keras.optimizers.SGD(1e-2, 0.9), "mse", run_eagerly=True)
        found, whole = map(train, models)
        for one, other in zip(whole, found, strict=True):
            np.testing.assert_array_equal(one, other)
        for one, other in zip(train(alone), found, strict=True):
            same_numbers.assert_close(other, one)

    def test_a_layout_that_names_data_chooses_the_dim(self):
        model = self.model(layouts={".*dense_1/kernel": (None, "data")})
        self.assertEqual(model.layers[0].kernel.value.sharding.data_dim, 0)
        self.assertEqual(model.layers[1].kernel.value.sharding.data_dim, 1)
        self.assertEqual(model.layers[1].kernel.value.values[0].shape, (32, 16))


class PenaltyOfGradients(keras.Model):
    """A loss that contains gradients of weights."""

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = inner.gradient(loss, variables)
            loss += tf.add_n([tf.reduce_sum(g * g) for g in gradients])
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class BadInputTest(tf.test.TestCase, parameterized.TestCase):
    def test_stages(self):
        mesh = tfscale.device_mesh(data=2, pipeline=2)
        with self.assertRaisesRegex(ValueError, "kept.*Use zero_stage=1"):
            tfscale.MeshStrategy(mesh, zero_stage=3)

    def test_one_replica(self):
        with self.assertRaisesRegex(ValueError, "Received: one replica"):
            tfscale.MeshStrategy(tfscale.device_mesh(model=2), zero_stage=3)

    def test_parameter_servers(self):
        strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(data=2), zero_stage=3
        )
        with strategy.scope(), small_weights_divided():
            model = mlp()
            with self.assertRaisesRegex(ValueError, "ParameterServerStrategy"):
                tfscale.ParameterServerModel(model)

    def assert_refused(
        self,
        text,
        optimizer=keras.optimizers.SGD,
        stage=3,
        elements=64,
        penalised=False,
        callbacks=(),
    ):
        """Nothing is changed by a `fit` that is refused."""
        strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(data=2), zero_stage=stage
        )
        with strategy.scope(), small_weights_divided(elements):
            model = mlp()
            if penalised:
                model = PenaltyOfGradients(model.inputs, model.outputs)
            model.compile(optimizer(), "mse")
        before = model.get_weights()
        with self.assertRaisesRegex(ValueError, text):
            model.fit(
                *(VECTORS, VECTORS[:, :, :1]), callbacks=callbacks, verbose=0
            )
        for one, other in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)

    def test_nothing_to_divide(self):
        self.assert_refused("needs weights that it can divide", elements=4096)

    def test_second_derivatives_by_weights(self):
        """Their sum over replicas would count as constant, without a word."""
        self.assert_refused("contain gradients of weights", penalised=True)

    @parameterized.parameters("Lamb", "Adafactor", "Muon")
    @pytest.mark.crossing(every=3)
    def test_optimizers_that_need_whole_variables(self, name):
        optimizer = getattr(keras.optimizers, name)
        self.assert_refused(f"must be elementwise.*{name}", optimizer)

    @parameterized.parameters(
        ({"k": ("data", "data")}, "'data' at most once"),
        ({"k": (("data", "model"), None)}, r"Received: \('data', 'model'\)"),
        ({".*dense_0/kernel": ("data", None)}, "The data axis must divide"),
    )
    def test_layouts(self, layouts, text):
        mesh = tfscale.device_mesh(data=3)
        with (
            self.assertRaisesRegex(ValueError, text),
            tfscale.MeshStrategy(mesh, layouts, zero_stage=3).scope(),
        ):
            mlp()

    @parameterized.parameters(
        (3, []), (2, [tfscale.callbacks.GradientAccumulation(2)])
    )
    def test_gradient_noise_scale(self, stage, callbacks):
        callbacks = [*callbacks, tfscale.callbacks.GradientNoiseScale()]
        self.assert_refused(
            f"zero_stage={stage}", stage=stage, callbacks=callbacks
        )
