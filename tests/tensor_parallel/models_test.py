"""Whole models of many kinds have the numbers of one device on model ranks."""

import contextlib
import functools

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.tensor_parallel import backbones
from tests.tensor_parallel import same_numbers_test
from tfscale.adapters.layer import MeshLayer

LAYERS = keras.layers
RANDOM = np.random.RandomState(0)
VECTORS = dict(
    x=RANDOM.randn(32, 12).astype("float32"),
    y=RANDOM.randn(32, 12).astype("float32"),
    batch_size=16,
)
RANDOM_TOKENS = RANDOM.randint(0, 24, (32, 6))
# A product in bfloat16 has 8 binary digits, in float16 11. Ranks round each
# term of a sum where one device rounds the sum; weights stay in float32 and
# differ by what steps of gradients of that precision do.
TOLERANCE = {"mixed_bfloat16": 2.0**-7, "mixed_float16": 2.0**-10}


def backbone(build):
    found = RANDOM.randint(0, 24, (32, 6))
    inputs = dict(token_ids=found, padding_mask=np.ones_like(found))
    targets = RANDOM.randn(32, 6, 16).astype("float32")
    return same_numbers.Job(build, dict(x=inputs, y=targets, batch_size=16))


def llama_layouts():
    mesh = keras.distribution.DeviceMesh(
        (1, 2), ("data", "model"), ["CPU:0", "CPU:1"]
    )
    layout_map = keras_hub.models.LlamaBackbone.get_layout_map(
        mesh, model_parallel_dim_name="model", data_parallel_dim_name="data"
    )
    return {pattern: layout for pattern, layout in layout_map.items()}


def channels():
    x = inputs = keras.Input((6, 6, 4))
    x = LAYERS.Conv2D(8, 3, padding="same", use_bias=False, name="split")(x)
    x = LAYERS.BatchNormalization(name="batch_norm")(x)
    x = LAYERS.Activation("relu", name="relu")(x)
    x = LAYERS.DepthwiseConv2D(3, padding="same", name="each")(x)
    x = LAYERS.Conv2D(4, 1, name="joined")(x)
    x = LAYERS.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, x)


def causal():
    x = inputs = keras.Input((6, 4))
    for name in ("split", "joined"):
        x = LAYERS.Conv1D(4, 3, padding="causal", dilation_rate=2, name=name)(x)
    return keras.Model(inputs, x)


class StandardizedConv(LAYERS.Conv2D):
    def convolution_op(self, inputs, kernel):
        return super().convolution_op(inputs, keras.ops.normalize(kernel, 2))


class TiedDense(LAYERS.Dense):
    @property
    def kernel(self):
        return self._kernel + keras.ops.mean(self._kernel)


class TalkingHeads(LAYERS.GroupQueryAttention):
    def _masked_softmax(self, scores, attention_mask=None):
        weights = super()._masked_softmax(scores, attention_mask)
        return weights + keras.ops.roll(weights, 1, axis=1)


def overridden():
    """What is called is Keras' own, but what that calls is not."""
    x = inputs = keras.Input((4, 4, 4))
    x = StandardizedConv(8, 1, name="channels")(x)
    x = LAYERS.Reshape((16, 8), name="sequence")(x)
    x = TalkingHeads(4, 4, 2, name="heads")(x, x)
    return keras.Model(inputs, TiedDense(6, name="dense")(x))


def normalized(**options):
    x = inputs = keras.Input((12,))
    x = LAYERS.Dense(24, name="split")(x)
    x = LAYERS.LayerNormalization(name="norm", **options)(x)
    x = LAYERS.Activation("gelu", name="gelu")(x)
    return keras.Model(inputs, LAYERS.Dense(12, name="joined")(x))


def einsum():
    x = inputs = keras.Input((3, 12))
    x = LAYERS.EinsumDense(
        "abc,cde->abde", (None, 4, 6), bias_axes="de", name="split"
    )(x)
    x = LAYERS.EinsumDense(
        "abde,dec->abc", (None, 12), bias_axes="c", name="joined"
    )(x)
    return keras.Model(inputs, x)


@keras.saving.register_keras_serializable("models_test")
class Merged(LAYERS.Layer):
    """Heads put together; TensorFlow does not know how many there are."""

    def call(self, x):
        return keras.ops.reshape(x, (keras.ops.shape(x)[0], -1))

    def compute_output_shape(self, shape):
        return shape[0], shape[1] * shape[2]


def merged():
    x = inputs = keras.Input((12,))
    x = Merged(name="merged")(LAYERS.Reshape((4, 3), name="heads")(x))
    return keras.Model(inputs, LAYERS.Dense(12, name="down")(x))


@keras.saving.register_keras_serializable("models_test")
class Centered(LAYERS.Layer):
    """Subtracts a mean, in inference only."""

    def __init__(self, axis, **kwargs):
        super().__init__(**kwargs)
        self.axis = axis

    def call(self, x, training=None):
        if training:
            return x
        return x - keras.ops.mean(x, axis=self.axis, keepdims=True)


def centered(axis):
    """Sharded along the axis as far as a trace of training shows."""
    x = inputs = keras.Input((4, 12))
    for _ in range(2):
        y = LAYERS.LayerNormalization()(x)
        y = LAYERS.Dense(24, activation="relu")(y)
        if axis == -1:
            y = Centered(axis)(y)
        x = LAYERS.Add()([x, LAYERS.Dense(12)(y)])
        if axis == 1:
            x = Centered(axis)(x)
    return keras.Model(inputs, x)


@keras.saving.register_keras_serializable("models_test")
class OfHeads(LAYERS.Layer):
    """Adds a loss of each head."""

    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x), axis=(0, 1, 3)))
        return x


def lost_by_heads():
    x = inputs = keras.Input((3, 12))
    x = LAYERS.EinsumDense("abc,cde->abde", (None, 4, 6), name="up")(x)
    x = OfHeads(name="heads")(x)
    x = LAYERS.EinsumDense("abde,dec->abc", (None, 12), name="down")(x)
    return keras.Model(inputs, x)


def trailing():
    """Dims that the equation does not name come last."""
    x = inputs = keras.Input((12, 3, 2))
    for name, units in (("split", 8), ("joined", 4)):
        x = LAYERS.EinsumDense("ab...,bc->ac...", (units,), name=name)(x)
    return keras.Model(inputs, x)


def looked_up():
    x = inputs = keras.Input((6,), dtype="int32")
    x = LAYERS.Embedding(24, 8, name="table")(x)
    return keras.Model(inputs, LAYERS.Dense(24, name="logits")(x))


class Table(LAYERS.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=(24, 8), name="table")

    def call(self, tokens):
        return keras.ops.take(self.table, tokens, axis=0)


def taken():
    """Gradients of rows, of a weight and of an output put together for it."""
    x = inputs = keras.Input((6,), dtype="int32")
    x = LAYERS.Dense(12, name="split")(Table(name="own")(x))
    x = keras.ops.take(x, [1, 1, 4], axis=-1)
    return keras.Model(inputs, LAYERS.Dense(24, name="logits")(x))


def recurrent():
    x = inputs = keras.Input((5, 4))
    x = LAYERS.GRU(8, return_sequences=True, name="gru")(x)
    return keras.Model(inputs, LAYERS.LSTM(4, name="lstm")(x))


@keras.saving.register_keras_serializable("models_test")
class Running(LAYERS.Layer):
    """Means of what has come so far, step by step: of a known length only."""

    def call(self, x):
        total, means = 0.0, []
        for t in range(x.shape[1]):
            total += x[:, t]
            means.append(total / (t + 1))
        return keras.ops.stack(means, axis=1)

    def compute_output_shape(self, input_shape):
        return input_shape


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="own")
        self.up = LAYERS.Dense(24, activation="relu", name="up")
        self.down = LAYERS.Dense(12, name="down")
        self.build((None, 12))

    def build(self, shape):
        self.up.build((None, 12))
        self.down.build((None, 24))
        self.built = True

    def call(self, x):
        return self.down(self.up(x))


def noted_losses():
    x = inputs = keras.Input((12,))
    # Its loss is there before ranks meet for the first time.
    x = LAYERS.Dense(12, name="first", activity_regularizer="l2")(x)
    x = LAYERS.ActivityRegularization(0.01, name="noted")(x)
    x = LAYERS.Dense(24, activation="relu", name="up")(x)
    x = LAYERS.Dense(12, name="down", activity_regularizer="l2")(x)
    return keras.Model(inputs, x)


def of_shape(build, x, y, batch_size=16):
    data = dict(
        x=RANDOM.randn(32, *x).astype("float32"),
        y=RANDOM.randn(32, *y).astype("float32"),
        batch_size=batch_size,
    )
    return same_numbers.Job(build, data)


PAIR = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}
ROWS = {
    "gru/gru_cell/(recurrent_)?kernel": (None, "model"),
    "lstm/lstm_cell/recurrent_kernel": ("model", None),
}
NORMALIZED = {
    "split/kernel": (None, "model"),
    "split/bias": ("model",),
    "norm/.*": ("model",),
    "joined/kernel": ("model", None),
}
JOBS = {
    "llama": (backbone(backbones.llama), None),
    "llama_own_layout": (backbone(backbones.llama), llama_layouts),
    "gpt2": (backbone(backbones.gpt2), None),
    "bert": (backbone(backbones.bert), None),
    "mixtral": (backbone(backbones.mixtral), None),
    "channels": (
        of_shape(channels, (6, 6, 4), (4,)),
        {
            "split/kernel": (None, None, None, "model"),
            "batch_norm/.*": ("model",),
            "each/kernel": (None, None, "model", None),
            "each/bias": ("model",),
            "joined/kernel": (None, None, "model", None),
        },
    ),
    "causal": (
        of_shape(causal, (6, 4), (6, 4)),
        {
            "split/kernel": (None, None, "model"),
            "joined/kernel": (None, "model", None),
        },
    ),
    "overridden": (
        of_shape(overridden, (4, 4, 4), (16, 6)),
        {
            "channels/kernel": (None, None, "model", None),
            "heads/(query|key|value)/kernel": (None, "model", None),
            "heads/attention_output/kernel": ("model", None, None),
            "dense/kernel": (None, "model"),
        },
    ),
    "layer_norm": (of_shape(normalized, (12,), (12,)), NORMALIZED),
    "rms_scaled": (
        # Once squares were added up before the mean was taken off.
        of_shape(functools.partial(normalized, rms_scaling=True), (12,), (12,)),
        NORMALIZED,
    ),
    "einsum": (
        of_shape(einsum, (3, 12), (3, 12)),
        {
            "split/kernel": (None, "model", None),
            "split/bias": ("model", None),
            "joined/kernel": ("model", None, None),
        },
    ),
    "merged": (
        # The last batch is smaller, so that no size is known.
        of_shape(merged, (12,), (12,), batch_size=12),
        {"down/kernel": ("model", None)},
    ),
    "lost_by_heads": (
        of_shape(lost_by_heads, (3, 12), (3, 12)),
        {
            "up/kernel": (None, "model", None),
            "down/kernel": ("model", None, None),
        },
    ),
    "trailing": (
        of_shape(trailing, (12, 3, 2), (4, 3, 2)),
        {"split/kernel": (None, "model"), "joined/kernel": ("model", None)},
    ),
    "rows": (
        same_numbers_test.tokens(looked_up),
        {"table/embeddings": ("model", None), "logits/kernel": (None, "model")},
    ),
    "taken": (
        same_numbers_test.tokens(taken),
        {"own/table": ("model", None), "split/kernel": (None, "model")},
    ),
    "recurrent": (of_shape(recurrent, (5, 4), (4,)), ROWS),
    "subclassed": (of_shape(Subclassed, (12,), (12,)), PAIR),
    "noted_losses": (of_shape(noted_losses, (12,), (12,)), PAIR),
}


@functools.cache
def one_device(name):
    return same_numbers.on_one_device(JOBS[name][0])


def mlp():
    x = inputs = keras.Input((12,))
    x = LAYERS.Dense(24, activation="relu", name="up")(x)
    return keras.Model(inputs, LAYERS.Dense(12, name="down")(x))


class Scale(LAYERS.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x * self.scale


def scaled():
    x = inputs = keras.Input((12,))
    x = LAYERS.Dense(24, activation="relu", name="up")(x)
    x = Scale(name="scale")(x)
    return keras.Model(inputs, LAYERS.Dense(12, name="down")(x))


class Around(keras.Model):
    """Calls a functional model, of what a layer of its own has computed."""

    def __init__(self):
        super().__init__()
        self.first = LAYERS.Dense(12, activation="tanh", name="first")
        x = inputs = keras.Input((12,))
        x = LAYERS.Dense(24, activation="tanh", name="up")(x)
        x = x * keras.ops.mean(inputs, axis=-1, keepdims=True)
        self.inner = keras.Model(inputs, LAYERS.Dense(12, name="down")(x))
        self.first.build((None, 12))
        self.built = True

    def call(self, x):
        return self.inner(self.first(x))


def adapted():
    """What LoRA can be enabled in, column- and row-parallel."""
    tokens = keras.Input((6,), dtype="int32")
    x = LAYERS.Embedding(24, 8, name="table")(tokens)
    x = LAYERS.EinsumDense("abc,cde->abde", (None, 2, 8), name="heads")(x)
    x = LAYERS.EinsumDense("abde,dec->abc", (None, 8), name="merged")(x)
    x = LAYERS.Dense(24, activation="relu", name="up")(x)
    return keras.Model(tokens, LAYERS.Dense(12, name="down")(x))


ADAPTED = {
    **PAIR,
    "table/embeddings": ("model", None),
    "heads/kernel": (None, "model", None),
    "merged/kernel": ("model", None, None),
}


def both(train, build=mlp, layouts=PAIR, num_replicas=2):
    """What `train(model)` returns on one device, and on two ranks each."""
    results = []
    for on_mesh in (False, True):
        same_numbers.reset()
        if not on_mesh:
            model = build()
            # By operations, as in `same_numbers.on_one_device`.
            model.compile = functools.partial(model.compile, run_eagerly=True)
            results.append(train(model))
            continue
        mesh = tfscale.device_mesh(data=num_replicas, model=2)
        with tfscale.MeshStrategy(mesh, layouts).scope():
            results.append(train(build()))
    return results


class ModelsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*reversed(JOBS))  # the smallest one always
    @pytest.mark.crossing(every=21)
    @pytest.mark.filterwarnings("ignore:You passed `rms_scaling")
    def test_has_the_numbers_of_one_device(self, name):
        job, layouts = JOBS[name]
        # BatchNormalization has the moments of a replica's part of the batch,
        # as has the balance of the experts.
        num_replicas = 1 if name in ("channels", "mixtral") else 2
        layouts = layouts() if callable(layouts) else layouts
        outcome = same_numbers.on_ranks(job, 2, num_replicas, layouts)
        same_numbers.assert_same(
            self, one_device(name), outcome, unmoved=("key/bias", "key_bias")
        )

    @parameterized.parameters(*TOLERANCE)
    @pytest.mark.crossing(every=2)
    def test_in_lower_precision(self, policy):
        keras.config.set_dtype_policy(policy)
        job = same_numbers.Job(mlp, VECTORS)
        expected = same_numbers.on_one_device(job)
        outcome = same_numbers.on_ranks(job, 2, 1, PAIR)
        same_numbers.assert_same(self, expected, outcome, TOLERANCE[policy])

    @parameterized.parameters((1, {}), (2, {}), (2, {"run_eagerly": True}))
    @pytest.mark.crossing(every=3)
    def test_methods_of_a_model(self, num_replicas, options):
        def train(model):
            model.compile(keras.optimizers.SGD(0.05, 0.9), "mse", **options)
            x, y = VECTORS["x"], VECTORS["y"]
            model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
            return [
                model.train_on_batch(x[:16], y[:16]),
                model.evaluate(x, y, batch_size=16, verbose=0),
                model.predict(x, batch_size=16, verbose=0),
                *model.get_weights(),
            ]

        pair = both(train, num_replicas=num_replicas)
        for expected, found in zip(*pair, strict=True):
            same_numbers.assert_close(found, expected)

    def test_a_reversible_embedding_gives_its_mask(self):
        def masked():
            x = inputs = keras.Input((6,), dtype="int32")
            x = LAYERS.ReversibleEmbedding(8, 4, mask_zero=True, name="table")(
                x
            )
            return keras.Model(inputs, LAYERS.GlobalAveragePooling1D()(x))

        x = np.array([[1, 2, 0, 0, 0, 0], [3, 4, 5, 0, 0, 0]])
        layouts = {"table/embeddings": ("model", None)}
        expected, found = both(
            lambda model: model.predict(x, verbose=0), masked, layouts, 1
        )
        self.assertAllClose(found, expected)

    def test_negative_tokens_count_from_the_end(self):
        # No rank had them: their embeddings were zeros.
        x = RANDOM_TOKENS[:8] - 24
        layouts = {"table/embeddings": ("model", None)}
        expected, found = both(
            lambda model: model.predict(x, verbose=0), looked_up, layouts, 1
        )
        same_numbers.assert_close(found, expected)

    @parameterized.parameters(False, True)
    @pytest.mark.crossing(every=2)
    def test_a_loop_by_hand(self, autograph):
        def train(model):
            optimizer = keras.optimizers.Adam(0.01)
            strategy = tf.distribute.get_strategy()

            def step(data):
                x, y = data
                with tf.GradientTape() as tape:
                    error = tf.reduce_sum(tf.square(model(x) - y))
                    loss = error / VECTORS["batch_size"]
                variables = model.trainable_variables
                gradients = tape.gradient(loss, variables)
                optimizer.apply_gradients(zip(gradients, variables))
                return loss

            run = tf.function(
                lambda data: strategy.run(step, args=(data,)),
                autograph=autograph,
            )
            data = tf.data.Dataset.from_tensor_slices(
                (VECTORS["x"], VECTORS["y"])
            ).batch(16)
            optimizer.build(model.trainable_variables)
            losses = [
                strategy.reduce("SUM", run(batch), axis=None)
                for batch in strategy.experimental_distribute_dataset(data)
            ]
            return [*losses, *model.get_weights()]

        for expected, found in zip(*both(train), strict=True):
            same_numbers.assert_close(found, expected)

    @parameterized.parameters(False, True)
    @pytest.mark.crossing(every=2)
    def test_a_loss_with_gradients_in_it(self, autograph):
        # Once they came from another thread, as constants.
        def train(model):
            optimizer = keras.optimizers.SGD(1e-4)
            optimizer.build(model.trainable_variables)

            def step(x):
                with tf.GradientTape() as outer:
                    with tf.GradientTape() as tape:
                        tape.watch(x)
                        y = tf.reduce_sum(tf.square(model(x)))
                    loss = tf.reduce_sum(tf.square(tape.gradient(y, x)))
                gradients = outer.gradient(loss, model.trainable_variables)
                optimizer.apply(gradients, model.trainable_variables)

            strategy = tf.distribute.get_strategy()
            before = model.get_weights()
            run = tf.function(
                lambda x: strategy.run(step, (x,)), autograph=autograph
            )
            run(VECTORS["x"])
            after = model.get_weights()
            return [now - then for now, then in zip(after, before)]

        # Two replicas add up gradients of the same rows.
        for expected, found in zip(*both(train), strict=True):
            self.assertGreater(np.abs(expected).max(), 1e-3)
            same_numbers.assert_close(found, 2 * expected)

    @parameterized.parameters(-1, 1)
    @pytest.mark.crossing(every=2)
    @pytest.mark.filterwarnings("ignore:Layers are sharded")
    @pytest.mark.crossing
    def test_a_layer_that_mixes_in_inference_only(self, axis):
        # The model was traced in training alone: in inference each rank took
        # the mean of its shard.
        x = RANDOM.randn(8, 4, 12).astype("float32")
        results = []
        for on_mesh in (False, True):
            same_numbers.reset()
            scope = contextlib.nullcontext()
            if on_mesh:
                layouts = {
                    "dense(_2)?/kernel": (None, "model"),
                    "dense_[13]/kernel": ("model", None),
                }
                scope = tfscale.MeshStrategy(
                    tfscale.device_mesh(model=2),
                    layouts,
                    sequence_parallel=axis == 1,
                ).scope()
            with scope:
                model = centered(axis)
                model.compile(
                    keras.optimizers.SGD(0.1), "mse", run_eagerly=not on_mesh
                )
            model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
            results.append([*model.get_weights(), model.predict(x, verbose=0)])
        for expected, found in zip(*results, strict=True):
            same_numbers.assert_close(found, expected)

    @pytest.mark.filterwarnings("ignore:Layers are sharded")
    @pytest.mark.crossing
    def test_a_layer_that_takes_known_lengths_only(self):
        # Its error in a graph of any length was that of `fit`.
        def build():
            inputs = keras.Input((None, 4))
            x = LAYERS.Dense(8, name="up")(inputs)
            x = LAYERS.Dense(4, name="down")(Running()(x))
            return keras.Model(inputs, x)

        layouts = {"up/kernel": (None, "model"), "down/kernel": ("model", None)}
        x = RANDOM.randn(4, 6, 4).astype("float32")

        def fitted(**options):
            keras.utils.set_random_seed(0)
            model = build()
            model.compile("sgd", "mse", **options)
            model.fit(x, x, 4, epochs=2, verbose=0)
            return model.predict(x, verbose=0)

        expected = fitted(run_eagerly=True)
        mesh = tfscale.device_mesh(model=2)
        with (
            tfscale.MeshStrategy(mesh, layouts).scope(),
            self.assertWarnsRegex(UserWarning, "(?s)whole act.*all sizes"),
        ):
            found = fitted()
        same_numbers.assert_close(found, expected)

    @parameterized.parameters(1, 2)
    @pytest.mark.crossing(every=2)
    def test_an_activation_is_replaced(self, num_replicas):
        # Once a softmax was that of each rank's units: the output stayed
        # sharded, as it could before.
        def train(model):
            for activation in ("relu", "softmax"):
                activation = keras.activations.get(activation)
                model.get_layer("up").activation = activation
                model.compile(keras.optimizers.SGD(0.1), "mse")
                model.fit(**VECTORS, shuffle=False, verbose=0)
            return model.get_weights()

        pair = both(train, num_replicas=num_replicas)
        for expected, found in zip(*pair, strict=True):
            same_numbers.assert_close(found, expected)

    @pytest.mark.crossing
    def test_layers_in_several_models(self):
        # What one model leaves sharded once left another one in parts.
        x, y = VECTORS["x"], VECTORS["y"]

        def train(model):
            up = model.get_layer("up")
            hidden = keras.Model(model.input, up.output)
            dropped = LAYERS.Dropout(0.5, seed=1, name="dropped")
            around = keras.Sequential([keras.Input((12,)), dropped, up])
            inside = keras.Model(model.input, dropped(up.output))
            if not tf.distribute.has_strategy():  # as `model` is
                for other in (inside, around, hidden):
                    other.compile = functools.partial(
                        other.compile, run_eagerly=True
                    )
            model.predict(x, verbose=0)
            for trained in (inside, around, hidden, model):
                trained.compile(keras.optimizers.SGD(0.1), "mse")
                target = y.repeat(2, 1)[:, : trained.output_shape[-1]]
                trained.fit(x, target, batch_size=16, shuffle=False, verbose=0)
            found = [m.predict(x, verbose=0) for m in (model, hidden)]
            run = tf.distribute.get_strategy().run
            tensors = (
                run(lambda: model(x) + 1.0),
                run(lambda: up(x) + 1.0),
                run(tf.function(lambda: hidden(x) + 1.0)),
            )
            return [
                *(getattr(t, "values", (t,))[0] for t in tensors),
                *found,
                *model.get_weights(),
            ]

        # Replicas have dropout masks of their own, so there is one.
        pair = both(train, num_replicas=1)
        for expected, found in zip(*pair, strict=True):
            same_numbers.assert_close(found, expected)

    @parameterized.parameters(1, 2)
    @pytest.mark.crossing(every=2)
    @pytest.mark.filterwarnings("ignore:Layers are sharded")
    @pytest.mark.crossing
    def test_a_frozen_layer_is_thawed(self, num_replicas):
        # A shard of what it multiplies was all that its gradient saw.
        def train(model):
            for trainable in (False, True):
                model.get_layer("scale").trainable = trainable
                model.compile(keras.optimizers.SGD(0.1), "mse")
                model.fit(**VECTORS, shuffle=False, verbose=0)
            return model.get_weights()

        pair = both(train, scaled, num_replicas=num_replicas)
        for expected, found in zip(*pair, strict=True):
            same_numbers.assert_close(found, expected)

    def test_sparse_inputs(self):
        # No custom gradient takes them.
        x = np.maximum(VECTORS["x"], 0)
        data = tf.data.Dataset.from_tensor_slices(
            (tf.sparse.from_dense(x), VECTORS["y"])
        ).batch(16)

        def build():
            x = inputs = keras.Input((12,), sparse=True)
            x = LAYERS.Dense(24, activation="relu", name="up")(x)
            return keras.Model(inputs, LAYERS.Dense(12, name="down")(x))

        def train(model):
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(data, verbose=0)
            return model.get_weights()

        for expected, found in zip(
            *both(train, build, num_replicas=1), strict=True
        ):
            same_numbers.assert_close(found, expected)

    @parameterized.parameters(1, 2)
    @pytest.mark.crossing(every=2)
    @pytest.mark.filterwarnings("ignore:Layers are sharded")
    def test_a_functional_model_within_another_layer(self, num_replicas):
        # The gradient of its input was that of a shard, where a mean of the
        # input is multiplied by one.
        def train(model):
            model.inner.predict(VECTORS["x"], verbose=0)
            model.compile(keras.optimizers.SGD(0.5), "mse")
            model.fit(**VECTORS, shuffle=False, verbose=0)
            return model.get_weights()

        pair = both(train, Around, num_replicas=num_replicas)
        for expected, found in zip(*pair, strict=True):
            same_numbers.assert_close(found, expected)

    @pytest.mark.crossing
    def test_low_rank_adaptation_in_mid_training(self):
        names = ("table", "heads", "merged", "up", "down")

        def train(model):
            fit = dict(
                x=RANDOM_TOKENS,
                y=VECTORS["y"][:, None].repeat(6, 1),
                batch_size=16,
                shuffle=False,
                verbose=0,
            )
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(**fit)
            for name in names:
                model.get_layer(name).enable_lora(
                    2, a_initializer="ones", b_initializer="ones"
                )
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(**fit)
            if isinstance(model.get_layer("up"), MeshLayer):
                for name in names:
                    call = model.get_layer(name).sharded_call
                    self.assertIsNotNone(call.rule)
                    self.assertEqual(
                        call.rule.stays_sharded, name in ("heads", "up")
                    )
            return [*model.get_weights(), model.predict(fit["x"], verbose=0)]

        for expected, found in zip(*both(train, adapted, ADAPTED), strict=True):
            same_numbers.assert_close(found, expected)


if __name__ == "__main__":
    tf.test.main()
