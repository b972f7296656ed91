"""Bytes that stages keep: closed forms, and estimates against what is."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from examples import gpt
from tfscale.pipeline import memory
from tfscale.pipeline import summary

ROWS = 4
ONE = ROWS * 64 * 4  # bytes of a tensor of 64 float32 numbers per example


def _mlp():
    # Inputs, outputs of both ReLUs, and the mask of the dropout (bool), which
    # multiplies by a number that is not kept.
    x = inputs = keras.Input((64,))
    x = keras.layers.Dense(64, activation="relu")(x)
    x = keras.layers.Dropout(0.5)(x)
    x = keras.layers.Dense(64, activation="relu")(x)
    x = keras.layers.Reshape((8, 8))(x)
    x = keras.layers.Flatten()(x)
    return keras.Model(inputs, keras.layers.Dense(64)(x))


def _cnn():
    x = inputs = keras.Input((16, 16, 3))
    for filters in (4, 8):
        x = keras.layers.Conv2D(filters, 3, padding="same")(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.MaxPooling2D()(keras.layers.ReLU()(x))
    x = keras.layers.Dense(10)(keras.layers.Flatten()(x))
    return keras.Model(inputs, x)


def _gpt():
    return gpt.build_gpt(2, 16, 2, 8, dropout=0.1)


def _fitted(build, num_stages, **kwargs):
    """A pipeline model that was trained on microbatches of `ROWS` rows."""
    mesh = tfscale.device_mesh(pipeline=num_stages)
    with tfscale.MeshStrategy(mesh).scope():
        model = tfscale.PipelineModel(build(), 2, **kwargs)
        model.compile("sgd", "mse")
    (given,), (made,) = model.model.inputs, model.model.outputs
    model.fit(
        np.ones((2 * ROWS, *given.shape[1:]), given.dtype),
        np.ones((2 * ROWS, *made.shape[1:]), made.dtype),
        batch_size=2 * ROWS,
        verbose=0,
    )
    return model


def _exact(model):
    (program,) = model.programs
    return list(memory.activation_bytes(program.stages))


class ActivationBytesTest(tf.test.TestCase, parameterized.TestCase):
    def test_every_buffer_counts_once(self):
        # The input, two ReLUs, the dropped-out tensor, its mask of one byte a
        # number, and what the loss keeps: the difference to the targets.
        # Reshape and Flatten only give the second ReLU new names.
        self.assertEqual(
            _exact(_fitted(_mlp, 1)), [ONE + 2 * ONE + ONE + ONE // 4 + ONE]
        )

    @parameterized.parameters(False, True)
    def test_recomputing_stages_keep_their_inputs(self, recompute):
        (zero, one) = _exact(_fitted(_mlp, 2, recompute=recompute))
        if recompute:
            self.assertEqual((zero, one), (ONE, ONE))
        else:
            self.assertGreater(min(zero, one), ONE)

    # In the GPT Grappler finds that two lookups keep the same numbers.
    @parameterized.parameters((_mlp, 0), (_cnn, 0), (_gpt, 0.002))
    def test_estimate_is_what_a_stage_keeps(self, build, rtol):
        model = _fitted(build, 2)
        estimated = summary.stage_memory(model._plan, ROWS)
        self.assertAllClose(
            _exact(model), [s.activations for s in estimated], rtol, atol=0
        )

    def test_sizes_that_nobody_knows_are_refused(self):
        model = _fitted(_mlp, 1)
        model._programs.clear()
        model.fit(np.ones((3, 64)), np.ones((3, 64)), verbose=0)
        with self.assertRaisesRegex(ValueError, "num_microbatches divides"):
            _exact(model)


class TrainingBytesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(("float32", 4, 4), ("bfloat16", 2, 4))
    def test_gradients_are_summed_in_float32(self, dtype, size, sum_size):
        layer = keras.layers.Dense(3, dtype=dtype)
        layer.build((None, 5))
        frozen = keras.layers.Dense(7, dtype=dtype, trainable=False)
        frozen.build((None, 1))
        self.assertEqual(
            memory.training_bytes(
                [*layer.variables, *frozen.variables], num_slots=1
            ),
            ((18 + 14) * size, 18 * sum_size, 18 * size),
        )


if __name__ == "__main__":
    tf.test.main()
