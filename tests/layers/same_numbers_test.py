"""Models written with tfscale.layers have the numbers of one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers

# Replicas and ranks.
SIZES = ((1, 2), (1, 3), (2, 2))
VOCABULARY = 84
IGNORED = 5


def mlp(dropout=0.0):
    """Pairs of layers, one with a layer in between, and gathered outputs."""
    layers = tfscale.layers
    x = inputs = keras.Input((12,))
    x = layers.ColumnParallelDense(24, "relu", name="up_0")(x)
    x = keras.layers.Dropout(dropout, name="dropout")(x)
    x = layers.RowParallelDense(12, name="down_0")(x)
    x = layers.ColumnParallelDense(
        24, "softmax", gather_output=True, name="up_1"
    )(x)
    x = layers.RowParallelDense(
        12, "tanh", input_is_parallel=False, use_bias=False, name="down_1"
    )(x)
    return keras.Model(inputs, x, name="mlp")


def block(x, name, use_bias):
    """Attention and MLP of a transformer."""
    layers = tfscale.layers
    y = keras.layers.LayerNormalization(name=f"{name}_norm")(x)
    y = layers.ParallelMultiHeadAttention(
        12, 2, use_bias=use_bias, name=f"{name}_attention"
    )(y, y, use_causal_mask=True)
    x = keras.layers.Add(name=f"{name}_add")([x, y])
    y = layers.ColumnParallelDense(48, "gelu", name=f"{name}_up")(x)
    y = layers.RowParallelDense(24, name=f"{name}_down")(y)
    return keras.layers.Add(name=f"{name}_sum")([x, y])


def gpt(tied=True, use_bias=True, num_blocks=2):
    """The logits are those of the embedding in reverse."""
    inputs = keras.Input((6,), dtype="int32")
    embedding = tfscale.layers.VocabParallelEmbedding(
        VOCABULARY, 24, tie_weights=tied, name="tokens"
    )
    x = embedding(inputs)
    for index in range(num_blocks):
        x = block(x, f"block_{index}", use_bias)
    return keras.Model(inputs, embedding(x, reverse=True), name="gpt")


def mixed():
    """The policy is set here because the harness clears Keras' state."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    return gpt()


class Subclassed(keras.Model):
    """Not functional: what stays sharded is not found by analysis."""

    def __init__(self):
        super().__init__(name="subclassed")
        layers = tfscale.layers
        self.tokens = layers.VocabParallelEmbedding(
            VOCABULARY, 24, name="tokens"
        )
        self.attention = layers.ParallelMultiHeadAttention(
            12, 2, name="attention"
        )
        self.up = layers.ColumnParallelDense(48, "gelu", name="up")
        self.down = layers.RowParallelDense(24, name="down")

    def call(self, inputs):
        x = self.tokens(inputs)
        x = x + self.attention(x, x, use_causal_mask=True)
        x = x + self.down(self.up(x))
        return self.tokens(x, reverse=True)


def subclassed():
    """Built before, so that the harness finds its weights."""
    model = Subclassed()
    model(keras.Input((6,), dtype="int32"))
    return model


def loss():
    return tfscale.losses.VocabParallelSparseCategoricalCrossentropy(
        ignore_class=IGNORED, label_smoothing=0.1
    )


def vectors(build=mlp, **kwargs):
    random = np.random.RandomState(0)
    data = dict(
        x=random.randn(48, 12).astype("float32"),
        y=random.randn(48, 12).astype("float32"),
        batch_size=16,
    )
    return same_numbers.Job(build, data, **kwargs)


def tokens(build, **kwargs):
    random = np.random.RandomState(0)
    found = random.randint(0, VOCABULARY, (48, 7))
    # Different numbers of ignored labels on the replicas would make their
    # means weigh differently, in plain Keras too: as many in each row.
    found[:, 3] = IGNORED
    found[:, 5] = np.where(found[:, 5] == IGNORED, 0, found[:, 5])
    labels = found[:, 1:]
    for column in (0, 1, 3, 4, 5):
        labels[labels[:, column] == IGNORED, column] = 0
    data = dict(x=found[:, :-1], y=labels, batch_size=16)
    return same_numbers.Job(build, data, loss=loss, **kwargs)


# Adam makes whole steps of gradients that are rounding errors, but for its
# epsilon.
ADAM = dict(optimizer=lambda: keras.optimizers.Adam(0.01, epsilon=1e-3))
JOBS = {
    "mlp_sgd": vectors(),
    "mlp_adam": vectors(**ADAM),
    "gpt_sgd": tokens(gpt),
    # Several blocks are those of the other: here it is the head that differs.
    "block_adam": tokens(
        functools.partial(gpt, tied=False, num_blocks=1), **ADAM
    ),
    "subclassed_sgd": tokens(
        subclassed, compile=lambda: dict(metrics=["accuracy"])
    ),
}
MIXED = tokens(mixed)


@functools.cache
def one_device(name):
    return same_numbers.on_one_device(JOBS[name])


class SameNumbersTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(job=list(JOBS), size=SIZES)
    @pytest.mark.crossing(every=15)
    def test_of_one_device(self, job, size):
        num_replicas, num_ranks = size
        outcome = same_numbers.on_ranks(
            JOBS[job], num_ranks, num_replicas, layouts={}
        )
        same_numbers.assert_same(
            self, one_device(job), outcome, unmoved=("key_bias",)
        )
        self.assert_sharded(outcome.model, num_replicas, num_ranks)

    def assert_sharded(self, model, num_replicas, num_ranks):
        found = 0
        for layer in model._flatten_layers():
            for variable in layer._trainable_variables:
                dims = getattr(layer, "model_parallel_dims", {})
                dim = dims.get(variable.name)
                shape = list(variable.shape)
                if dim is not None:
                    shape[dim] //= num_ranks
                    found += 1
                parts = variable.value.values
                self.assertLen(parts, num_replicas * num_ranks)
                if dim is not None:
                    for part in parts:
                        self.assertEqual(part.shape, shape)
        self.assertGreater(found, 2)

    @parameterized.parameters(2, 4)
    @pytest.mark.crossing
    def test_mixed_precision_is_as_far_from_float32_as_on_one_device(
        self, num_ranks
    ):
        exact, one = one_device("gpt_sgd"), same_numbers.on_one_device(MIXED)
        ranks = same_numbers.on_ranks(MIXED, num_ranks, layouts={})
        layer = ranks.model.get_layer("block_0_up")
        self.assertEqual(layer.compute_dtype, "bfloat16")
        # Each rank rounds its term to 8 bits, where one device rounds the sum:
        # other errors of the same size. A gradient that one rank keeps to
        # itself is wrong by half of it, not by some hundredths.
        error = largest_error(exact, one)
        self.assertLess(error, 0.1)
        self.assertLess(largest_error(exact, ranks), 2 * error)


def largest_error(expected, actual):
    """Of all weights, by the measure of the harness."""
    return max(
        np.abs(actual.variables[path] - value).max()
        / np.maximum(np.abs(value).max(), np.abs(expected.initial[path]).max())
        for path, value in expected.variables.items()
        if not path.endswith("key/bias")
    )


if __name__ == "__main__":
    tf.test.main()
