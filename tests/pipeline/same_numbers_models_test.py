"""A pipeline has the numbers of one device: what a model may be made of."""

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import same_numbers

RANDOM = np.random.RandomState(0)
# Two batches of 16 and one of 2, which is less than the microbatches are.
ROWS = 34
FEATURES = RANDOM.normal(size=(ROWS, 6)).astype("float32")
SEQUENCES = RANDOM.normal(size=(ROWS, 5, 4)).astype("float32")
TOKENS = RANDOM.randint(1, 9, (ROWS, 5))
# Every row has another length, so means over microbatches are no mean.
PADDED = np.where(np.arange(5) < RANDOM.randint(1, 6, (ROWS, 1)), TOKENS, 0)
VALUES = RANDOM.normal(size=(ROWS, 3)).astype("float32")
LABELS = RANDOM.randint(0, 9, (ROWS, 5))


def dense(units=8, **options):
    return keras.layers.Dense(units, "tanh", **options)


def skips_over_stages():
    """From stage 0 to 3, from the input to the last, from 1 to 2."""
    inputs = keras.Input((6,))
    a = dense(name="a")(inputs)
    b = dense(name="b")(a)
    c = keras.layers.Add()([dense(name="c")(b), b])
    d = dense(name="d")(c)
    d = keras.layers.Concatenate()([d, a, inputs])
    return keras.Model(inputs, keras.layers.Dense(3)(d + 1.0))


def several_inputs_and_outputs():
    """The second input is used late; the first output is made early."""
    left, right = (
        keras.Input((6,), name="left"),
        keras.Input((6,), name="right"),
    )
    a = dense(name="a")(left)
    early = keras.layers.Dense(3, name="early")(a)
    b = dense(name="b")(keras.layers.Concatenate()([a, right]))
    c = dense(name="c")(keras.layers.Concatenate()([b, early]))
    late = keras.layers.Dense(3, name="late")(c)
    return keras.Model(
        {"left": left, "right": right}, {"late": late, "early": early}
    )


def nested_models():
    """A functional model called twice, a Sequential one in another."""
    inner_input = keras.Input((8,))
    h = dense(name="inner")(inner_input)
    block = keras.Model(inner_input, [h, h + inner_input], name="block")
    head = keras.Sequential(
        [
            keras.Sequential([dense(name="h1")], name="deeper"),
            keras.layers.Dense(3, name="h2"),
        ],
        name="head",
    )
    inputs = keras.Input((6,))
    x, y = block(dense(name="a")(inputs))
    x, y = block(x + y)
    return keras.Model(inputs, head(x * y))


def tied_layers():
    """One layer in the first and the last stage, one called twice in one."""
    inputs = keras.Input((6,))
    tied, twice = dense(name="tied"), dense(name="twice")
    x = tied(dense(name="a")(inputs))
    x = twice(twice(x))
    x = tied(dense(name="b")(x))
    return keras.Model(inputs, keras.layers.Dense(3, name="c")(x))


def tied_embedding():
    """The embedding is also the head: a lookup and a product."""
    tokens = keras.Input((5,), dtype="int32")
    embedding = keras_hub.layers.ReversibleEmbedding(9, 6, name="embedding")
    x = dense(6, name="a")(embedding(tokens))
    return keras.Model(tokens, embedding(dense(6, name="b")(x), reverse=True))


def untied_embedding():
    """The layer of the embedding has the head too, in weights of its own."""
    tokens = keras.Input((5,), dtype="int32")
    embedding = keras_hub.layers.ReversibleEmbedding(
        9, 6, tie_weights=False, name="embedding"
    )
    x = dense(6, name="a")(embedding(tokens))
    return keras.Model(tokens, embedding(x, reverse=True))


def frozen_layers():
    """A frozen layer between trained ones, and a whole frozen stage."""
    inputs = keras.Input((6,))
    x = dense(name="f1", trainable=False)(inputs)
    x = dense(name="f2", trainable=False)(x)
    x = dense(name="a")(x)
    x = dense(name="f3", trainable=False)(x)
    x = keras.layers.BatchNormalization(name="f4", trainable=False)(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="b")(x))


def frozen_nested_model():
    """A nested model called with training=False, its statistics at rest."""
    inner = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.LayerNormalization(),
            dense(name="inner"),
        ]
    )
    inputs = keras.Input((6,))
    x = inner(dense(name="a")(inputs), training=False)
    return keras.Model(inputs, keras.layers.Dense(3, name="b")(x))


def masks_of_embedding():
    """A mask made in stage 0 is used by RNNs, losses and metrics later."""
    tokens = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(9, 8, mask_zero=True)(tokens)
    x = dense(name="a")(x)
    x = keras.layers.GRU(8, return_sequences=True, name="gru")(x)
    x = keras.layers.Dropout(0.0)(x)
    return keras.Model(tokens, keras.layers.Dense(9, name="b")(x))


def masks_of_masking():
    inputs = keras.Input((5, 4))
    x = keras.layers.Masking()(inputs)
    x = dense(name="a")(x)
    x = keras.layers.LSTM(6, name="lstm")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="b")(x))


def recurrent_layers():
    """LSTM with states handed to a later stage, GRU, both directions."""
    inputs = keras.Input((5, 4))
    x, h, c = keras.layers.LSTM(
        6, return_sequences=True, return_state=True, name="lstm"
    )(inputs)
    x = keras.layers.Bidirectional(
        keras.layers.GRU(3, return_sequences=True), name="both"
    )(x)
    x = keras.layers.LSTM(6, name="last")(x, initial_state=[h, c])
    return keras.Model(inputs, keras.layers.Dense(3, name="b")(x))


class Penalty(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


class Lookup(keras.layers.Layer):
    """The gradient by what rows are looked up in comes as sparse slices."""

    def call(self, x):
        return keras.ops.take(x, keras.ops.arange(keras.ops.shape(x)[0]), 0)


def lookups_in_activations():
    inputs = keras.Input((6,))
    x = Lookup(name="lookup")(dense(name="a")(inputs))
    return keras.Model(inputs, keras.layers.Dense(3, name="b")(x))


def added_losses():
    inputs = keras.Input((6,))
    x = dense(name="a", kernel_regularizer="l2", bias_regularizer="l1")(inputs)
    x = Penalty()(x)
    x = dense(name="b", activity_regularizer=keras.regularizers.L2(0.05))(x)
    x = keras.layers.ActivityRegularization(l1=0.01)(x)
    tied = dense(name="c", kernel_regularizer=keras.regularizers.L1L2(0.01))
    return keras.Model(inputs, keras.layers.Dense(3, name="d")(tied(tied(x))))


def added_losses_of_calls():
    """Each call of a layer adds a loss; Keras clears those of other calls."""
    inputs = keras.Input((6,))
    regularized = dense(name="regularized", activity_regularizer="l1")
    penalty = Penalty(name="penalty")
    x = dense(name="a")(inputs)
    for name in ("b", "c", "d"):
        x = dense(name=name)(penalty(regularized(penalty(regularized(x)))))
    return keras.Model(inputs, keras.layers.Dense(3, name="e")(x))


class Seen(keras.layers.Layer):
    """Its metric showed 0.0: the variable was none of the stage's."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x):
        self.seen.update_state(keras.ops.square(x))
        return x


class Spare(keras.layers.Layer):
    """Its weight, which no output uses, was not regularized."""

    def build(self, _):
        self.spare = self.add_weight(
            shape=(3,), initializer="ones", regularizer="l2", name="spare"
        )

    def call(self, x):
        return x


def spare_weight():
    inputs = keras.Input((6,))
    x = Spare(name="s")(dense(name="a")(inputs))
    return keras.Model(inputs, keras.layers.Dense(3, name="b")(x))


def metric_in_layer():
    inputs = keras.Input((6,))
    x = Seen(name="s")(dense(name="a")(inputs))
    return keras.Model(inputs, keras.layers.Dense(3, name="b")(x))


def weights_of_another_stage():
    """The kernel of one layer is an argument of an operation."""
    inputs = keras.Input((6,))
    first = dense(name="a")
    x = dense(6, name="b")(first(inputs))
    x = keras.ops.matmul(x, first.kernel)
    return keras.Model(inputs, keras.layers.Dense(3, name="c")(x))


def constraints():
    inputs = keras.Input((6,))
    x = dense(name="a", kernel_constraint="unit_norm")(inputs)
    x = dense(name="b", kernel_constraint=keras.constraints.MaxNorm(0.5))(x)
    return keras.Model(
        inputs, keras.layers.Dense(3, bias_constraint="non_neg", name="c")(x)
    )


def language_model():
    """A backbone of keras_hub, its own embedding as its head."""
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=9,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        dropout=0.0,
        max_sequence_length=5,
    )
    inputs = backbone.input
    logits = backbone.token_embedding(backbone(inputs), reverse=True)
    return keras.Model(inputs, logits)


def self_attention():
    """Attention with a mask that crosses the cut, and a causal one."""
    tokens = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(9, 8, mask_zero=True)(tokens)
    h = keras.layers.MultiHeadAttention(2, 4, name="a")(x, x)
    x = keras.layers.LayerNormalization(name="n")(x + h)
    h = keras.layers.MultiHeadAttention(2, 4, name="b")(
        x, x, use_causal_mask=True
    )
    return keras.Model(tokens, keras.layers.Dense(9, name="c")(x + h))


class Branching(keras.layers.Layer):
    """A loop with a branch of three in a branch of two, all differentiated."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x):
        ops = keras.ops

        def turn(i, x):
            def three():
                return ops.switch(
                    i % 3,
                    [
                        lambda x: ops.sin(x * self.scale),
                        lambda x: x + self.scale,
                        lambda x: ops.exp(-x * x) * self.scale,
                    ],
                    x,
                )

            x = ops.cond(ops.sum(self.scale) > 0, three, lambda: x - self.scale)
            return i + 1, x

        return ops.while_loop(lambda i, x: i < 3, turn, (0, x))[1]


def branches():
    """Grappler made operations of branches that no function can have."""
    inputs = keras.Input((6,))
    x = Branching(name="first")(dense(name="a")(inputs))
    x = Branching(name="second")(dense(name="b")(x))
    return keras.Model(inputs, keras.layers.Dense(3, name="c")(x))


def flat_branches():
    """Two branches of three layers each, in no models of their own."""
    inputs = keras.Input((6,))
    ends = []
    for branch in range(2):
        x = inputs
        for index in range(3):
            x = dense(name=f"b{branch}_{index}")(x)
        ends.append(x)
    x = keras.layers.Concatenate(name="join")(ends)
    return keras.Model(inputs, keras.layers.Dense(3, name="end")(x))


class Block(keras.layers.Layer):
    """A layer made of layers, one of them made of layers itself."""

    def __init__(self, depth):
        super().__init__(name=f"block_{depth}")
        self.norm = keras.layers.LayerNormalization(name="norm")
        self.dense = dense(name="dense")
        self.inner = Block(depth - 1) if depth else keras.layers.Identity()

    def build(self, shape):
        for layer in (self.norm, self.dense, self.inner):
            layer.build(shape)

    def call(self, x, training=None):
        h = self.inner(self.dense(self.norm(x)), training=training)
        return keras.ops.concatenate([x[:, :4] + h[:, :4], h[:, 4:]], axis=1)


def composite_layers():
    inputs = keras.Input((6,))
    x = Block(2)(dense(name="a")(inputs))
    return keras.Model(inputs, keras.layers.Dense(3, name="b")(x))


def spectral_normalization():
    inputs = keras.Input((6,))
    x = keras.layers.SpectralNormalization(dense(name="a"))(inputs)
    x = keras.layers.SpectralNormalization(dense(name="b"))(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="c")(x))


def convolutions():
    inputs = keras.Input((6,))
    x = keras.layers.Reshape((6, 1))(inputs)
    x = keras.layers.Conv1D(4, 3, padding="same", name="a")(x)
    x = keras.layers.GroupNormalization(2, name="n")(x)
    x = keras.layers.MaxPooling1D()(x)
    x = keras.layers.Conv1D(4, 2, name="b")(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="c")(x))


class Spectrum(keras.layers.Layer):
    def call(self, x):
        return tf.signal.fft(tf.complex(x, tf.zeros_like(x)))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "complex64")


class RealPart(keras.layers.Layer):
    def call(self, x):
        return tf.math.real(tf.signal.ifft(x * tf.complex(0.5, 0.5)))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "float32")


def complex_tensors():
    inputs = keras.Input((6,))
    x = Spectrum(name="spectrum")(dense(name="a")(inputs))
    x = RealPart(name="real", autocast=False)(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="b")(x))


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


BY_VALUES = dict(x=FEATURES, y=VALUES)
BY_LABELS = dict(x=TOKENS, y=LABELS)
# Model, data, loss, and the cuts: each row is an item that may break alone.
MODELS = dict(
    skips=(skips_over_stages, BY_VALUES, "mse", ["b", "c", "d"]),
    inputs_and_outputs=(
        several_inputs_and_outputs,
        dict(
            x={"left": FEATURES, "right": FEATURES[::-1]},
            y={"late": VALUES, "early": VALUES[::-1]},
        ),
        {"late": "mse", "early": "mae"},
        ["b", "c"],
    ),
    nested=(nested_models, BY_VALUES, "mse", "params"),
    tied_layers=(tied_layers, BY_VALUES, "mse", ["twice", "b"]),
    tied_embedding=(tied_embedding, BY_LABELS, crossentropy(), ["a", "b"]),
    untied_embedding=(untied_embedding, BY_LABELS, crossentropy(), ["a"]),
    frozen=(frozen_layers, BY_VALUES, "mse", ["a", "f3"]),
    frozen_nested=(frozen_nested_model, BY_VALUES, "mse", ["inner", "b"]),
    embedding_mask=(
        masks_of_embedding,
        dict(x=PADDED, y=LABELS),
        crossentropy(),
        ["a", "gru"],
    ),
    masking=(
        masks_of_masking,
        dict(x=SEQUENCES * (PADDED > 0)[..., None], y=VALUES),
        "mse",
        ["a", "lstm"],
    ),
    recurrent=(
        recurrent_layers,
        dict(x=SEQUENCES, y=VALUES),
        "mse",
        ["both", "last"],
    ),
    composite=(composite_layers, BY_VALUES, "mse", "flops"),
    branches=(branches, BY_VALUES, "mse", ["b"]),
    flat_branches=(flat_branches, BY_VALUES, "mse", ["b1_0"]),
    lookups=(lookups_in_activations, BY_VALUES, "mse", ["lookup"]),
    added_losses=(added_losses, BY_VALUES, "mse", ["b", "c"]),
    added_losses_of_calls=(
        added_losses_of_calls,
        BY_VALUES,
        "mse",
        ["c"],
    ),
    spare_weight=(spare_weight, BY_VALUES, "mse", ["s"]),
    metric_in_layer=(metric_in_layer, BY_VALUES, "mse", ["s"]),
    weights_of_another=(weights_of_another_stage, BY_VALUES, "mse", ["b"]),
    constraints=(constraints, BY_VALUES, "mse", ["b", "c"]),
    language_model=(
        language_model,
        dict(
            x={"token_ids": PADDED, "padding_mask": PADDED > 0},
            y=LABELS,
            sample_weight=(PADDED > 0).astype("float32"),
        ),
        crossentropy(),
        "params",
    ),
    attention=(
        self_attention,
        dict(x=PADDED, y=LABELS),
        crossentropy(),
        ["n", "b"],
    ),
    convolutions=(convolutions, BY_VALUES, "mse", ["n", "b"]),
)


def job(name):
    build, data, loss, _ = MODELS[name]
    return same_numbers.Job(
        build,
        dict(**data, batch_size=16),
        loss=lambda: loss,
    )


class ModelsTest(parameterized.TestCase):
    @parameterized.named_parameters((name, name) for name in MODELS)
    @pytest.mark.crossing(every=24)
    def test_three_steps(self, name):
        cuts = MODELS[name][-1]
        stages = 3 if isinstance(cuts, str) else 1 + len(cuts)
        one = same_numbers.on_one_device(job(name))
        many = same_numbers.on_mesh(
            job(name), stages, 3, 2 if stages < 4 else 1, balance=cuts
        )
        # The softmax of attention takes no notice of a bias of keys.
        same_numbers.assert_same(self, one, many, unmoved=["key_bias"])
        x = MODELS[name][1]["x"]
        predictions = many.model.predict(x, batch_size=16)
        expected = one.model.predict(x, batch_size=16)
        keras.tree.map_structure(
            same_numbers.assert_close, predictions, expected
        )


class AssigningTest(parameterized.TestCase):
    @pytest.mark.crossing
    def test_a_layer_may_assign_to_its_kernel(self):
        # The kernel that it normalized was forgotten behind the forward. Each
        # call goes on with the iteration, so with one microbatch only.
        spectral = same_numbers.Job(
            spectral_normalization, dict(**BY_VALUES, batch_size=16)
        )
        one = same_numbers.on_one_device(spectral)
        for recompute, replicas in ((True, 1), (False, 2)):
            many = same_numbers.on_mesh(
                spectral, 2, 1, replicas, recompute=recompute
            )
            same_numbers.assert_same(self, one, many)


class ComplexTest(parameterized.TestCase):
    @pytest.mark.crossing
    def test_a_complex_tensor_crosses_a_cut(self):
        # The layers before it were not trained: only floats had gradients.
        job = same_numbers.Job(
            complex_tensors, dict(**BY_VALUES, batch_size=16)
        )
        one = same_numbers.on_one_device(job)
        many = same_numbers.on_mesh(job, 2, 3, balance=["real"])
        same_numbers.assert_same(self, one, many)
