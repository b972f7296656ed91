"""Replicas draw random numbers of their own, whatever else a mesh divides.

All replicas had the same masks of Dropout: of 16 rows on two replicas only 8
had a mask that no other row had. Here each row has a row of a table for itself,
of which those units have a gradient that are not dropped.
"""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers

LAYERS = keras.layers
UNITS, ROWS = 32, 8


class Deep(LAYERS.Layer):
    """Has its generator where Keras does not look for one."""

    def __init__(self):
        super().__init__(name="deep")
        generator = keras.random.SeedGenerator(3)
        self.hidden = lambda: generator

    def call(self, x, training=False):
        seed = self.hidden()
        return keras.random.dropout(x, 0.5, seed=seed) if training else x


class Tables(keras.callbacks.Callback):
    """Notes the table of a layer, before training and after each step."""

    def __init__(self, layer):
        super().__init__()
        self.found = [layer.embeddings.numpy()]
        self._layer = layer

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(self._layer.embeddings.numpy())


@functools.cache
def masks(
    make_layer=lambda: LAYERS.Dropout(0.5),
    rows=ROWS,
    microbatches=None,
    accumulated=None,
    layer_in_scope=True,
    zero_stage=0,
    recompute=False,
    **axes,
):
    """Which units of each row are kept, in the order of rows, of two steps."""
    same_numbers.reset()
    layer = None if layer_in_scope else make_layer()
    mesh = tfscale.device_mesh(**axes)
    layout_map = None
    if "model" in axes:
        layout_map = keras.distribution.LayoutMap(mesh)
        layout_map[".*up/kernel"] = (None, "model")
    strategy = tfscale.MeshStrategy(mesh, layout_map, zero_stage=zero_stage)
    with strategy.scope():
        table = LAYERS.Embedding(rows, UNITS, embeddings_initializer="ones")
        identity = dict(kernel_initializer="identity", use_bias=False)
        up = LAYERS.Dense(UNITS, name="up", trainable=False, **identity)
        layers = [table, LAYERS.Flatten(), layer or make_layer(), up]
        model = keras.Sequential([keras.Input((1,)), *layers])
        if microbatches:
            options = dict(balance=["up"]) if "pipeline" in axes else {}
            options["recompute"] = recompute
            model = tfscale.PipelineModel(model, microbatches, **options)
        model.compile(
            keras.optimizers.SGD(1.0, momentum=1e-3),
            lambda y_true, y_pred: tf.reduce_mean(y_pred, axis=-1),
        )
    tables = Tables(table)
    callbacks = [tables]
    if accumulated:
        callbacks.append(tfscale.callbacks.GradientAccumulation(accumulated))
    x = np.arange(rows)[:, None]
    model.fit(
        *(x, x),
        batch_size=rows,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    # What is dropped has no gradient.
    least = 1.0 / (rows * UNITS)
    changes = [a - b > least for a, b in itertools.pairwise(tables.found)]
    return [list(map(tuple, change)) for change in changes]


class DrawsOfReplicasTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("replicas", dict(data=2)),
        ("four", dict(data=4)),
        (
            "seeded",
            dict(data=2, make_layer=lambda: LAYERS.Dropout(0.5, seed=7)),
        ),
        ("generator_that_nobody_knows", dict(data=2, make_layer=Deep)),
        ("layer_made_outside", dict(data=2, layer_in_scope=False)),
        ("zero_stage", dict(data=2, zero_stage=1)),
        ("accumulation", dict(data=2, accumulated=2)),
        ("ranks", dict(data=2, model=2)),
        ("microbatches", dict(data=2, microbatches=2)),
        ("pipeline", dict(data=2, pipeline=2, microbatches=2)),
        ("all", dict(data=2, pipeline=2, model=2, microbatches=2)),
    )
    @pytest.mark.crossing(every=6)
    def test_no_two_rows_have_the_same_mask(self, arguments):
        found = masks(**arguments)
        self.assertLen({mask for step in found for mask in step}, 2 * ROWS)

    @parameterized.parameters(dict(accumulated=2), {}, dict(microbatches=2))
    @pytest.mark.crossing(every=3)
    def test_the_first_replica_has_those_of_one_device(self, **options):
        alone = masks(rows=ROWS // 2, **options)
        found = masks(data=2, **options)
        self.assertEqual([step[: ROWS // 2] for step in found], alone)

    @parameterized.parameters(
        (dict(microbatches=2), dict(pipeline=2, model=2)),
        (dict(microbatches=2), dict(pipeline=2, recompute=True)),
        (dict(microbatches=2), dict(pipeline=2)),
        (dict(microbatches=2), dict(model=2)),
        ({}, dict(model=2)),
        ({}, dict(microbatches=1)),
        ({}, dict(zero_stage=1)),
    )
    @pytest.mark.crossing(every=7)
    def test_they_are_the_same_for_any_division_of_stages_and_ranks(
        self, options, division
    ):
        expected = masks(data=2, **options)
        self.assertEqual(masks(data=2, **options, **division), expected)

    def test_they_are_the_same_for_a_seed(self):
        self.assertEqual(masks.__wrapped__(data=2), masks(data=2))


if __name__ == "__main__":
    tf.test.main()
