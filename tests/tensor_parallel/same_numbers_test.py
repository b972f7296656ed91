"""Layers split over model ranks have the numbers of one device."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import same_numbers
from tfscale.tensor_parallel import analysis

# With an epsilon that keeps the rounding of a gradient near zero from becoming
# a whole step, as it would be in the first steps of Adam.
ADAM = functools.partial(keras.optimizers.Adam, 0.01, epsilon=1e-3)
# Replicas and ranks.
SIZES = ((1, 2), (1, 3), (2, 2))
LAYERS = keras.layers


def mlp():
    x = inputs = keras.Input((12,))
    for index in range(2):
        x = LAYERS.Dense(24, activation="relu", name=f"up_{index}")(x)
        x = LAYERS.Dense(12, name=f"down_{index}")(x)
    return keras.Model(inputs, x, name="mlp")


def gpt(num_blocks=2, use_bias=True):
    """Blocks of attention and MLP, with dimensions that 12 divides."""
    tokens = keras.Input((6,), dtype="int32")
    x = LAYERS.Embedding(24, 24, name="tokens")(tokens)
    for index in range(num_blocks):
        y = LAYERS.LayerNormalization(name=f"norm_{index}")(x)
        y = LAYERS.MultiHeadAttention(
            12, 2, use_bias=use_bias, name=f"attention_{index}"
        )(y, y, use_causal_mask=True)
        x = LAYERS.Add(name=f"add_{index}")([x, y])
        y = LAYERS.Dense(48, activation="gelu", name=f"up_{index}")(x)
        y = LAYERS.Dense(24, name=f"down_{index}")(y)
        x = LAYERS.Add(name=f"sum_{index}")([x, y])
    return keras.Model(tokens, LAYERS.Dense(24, name="logits")(x), name="gpt")


def vectors(**kwargs):
    random = np.random.RandomState(0)
    return same_numbers.Job(
        mlp,
        dict(
            x=random.randn(48, 12).astype("float32"),
            y=random.randn(48, 12).astype("float32"),
            batch_size=16,
        ),
        **kwargs,
    )


def tokens(build=gpt, **kwargs):
    random = np.random.RandomState(0)
    # The last batch has ten rows.
    found = random.randint(0, 24, (42, 7))
    return same_numbers.Job(
        build,
        dict(x=found[:, :-1], y=found[:, 1:], batch_size=16),
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(
            from_logits=True
        ),
        compile=lambda: dict(metrics=["accuracy"]),
        **kwargs,
    )


JOBS = {
    "mlp_sgd": vectors(),
    "mlp_adam": vectors(optimizer=ADAM),
    "block_sgd": tokens(functools.partial(gpt, 1)),
    # Without biases: the gradient of a key's is zero but for rounding, and
    # Adam makes a whole step of any rounding.
    "gpt_adam": tokens(
        functools.partial(gpt, use_bias=False),
        optimizer=ADAM,
    ),
    "block_adam": tokens(
        functools.partial(gpt, 1, use_bias=False),
        optimizer=ADAM,
    ),
}


@functools.cache
def one_device(name):
    return same_numbers.on_one_device(JOBS[name])


class SameNumbersTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        *((job, size) for job in ("mlp_sgd", "mlp_adam") for size in SIZES),
        # What follows a block does not depend on how many ranks there are.
        ("gpt_adam", (1, 2)),
        ("gpt_adam", (2, 2)),
        ("block_adam", (1, 3)),
        ("block_adam", (1, 4)),
        ("block_sgd", (1, 3)),
    )
    @pytest.mark.crossing(every=15)
    def test_of_one_device(self, job, size):
        num_replicas, num_ranks = size
        outcome = same_numbers.on_ranks(JOBS[job], num_ranks, num_replicas)
        same_numbers.assert_same(
            self, one_device(job), outcome, unmoved=("key_bias",)
        )
        kept = [
            call.rule.stays_sharded
            for call in analysis.sharded_calls(outcome.model)
            if call.rule.source_dim is not None
        ]
        self.assertTrue(any(kept))
        for variable in outcome.model.variables:
            self.assertLen(variable.value.values, num_replicas * num_ranks)

    def test_several_steps_per_execution(self):
        # Inputs are those of replicas; as if of ranks, their specs disagreed.
        job = dataclasses.replace(
            JOBS["mlp_sgd"], compile=lambda: dict(steps_per_execution=2)
        )
        same_numbers.assert_same(
            self, one_device("mlp_sgd"), same_numbers.on_ranks(job, 2)
        )


if __name__ == "__main__":
    tf.test.main()
