"""Texts that a model takes apart by itself are divided as other data is."""

import contextlib

import keras
import numpy as np
import pytest
from absl.testing import parameterized

import tfscale
from tests import same_numbers

TEXTS = ["a b c", "b c", "c c d e", "a a", "d", "b e"]
Y = np.arange(6.0, dtype="float32")[:, None]


def fit(texts, axes):
    same_numbers.reset()
    scope = contextlib.nullcontext()
    if axes:
        scope = tfscale.MeshStrategy(tfscale.device_mesh(**axes)).scope()
    with scope:
        words = keras.layers.TextVectorization(
            vocabulary=list("abcde"), output_sequence_length=4
        )
        x = keras.Input((), dtype="string")
        y = keras.layers.Embedding(8, 4)(words(x))
        y = keras.layers.Dense(1)(keras.layers.Flatten()(y))
        model = keras.Model(x, y)
        if "pipeline" in axes:
            model = tfscale.PipelineModel(model, 2)
        model.compile("sgd", "mse", run_eagerly=not axes)
    history = model.fit(texts, Y, batch_size=4, shuffle=False, verbose=0)
    return history.history["loss"]


class RawStringsTest(parameterized.TestCase):
    @parameterized.parameters(dict(data=2), dict(data=2, pipeline=2))
    @pytest.mark.crossing(every=2)
    def test_are_as_on_one_device(self, **axes):
        texts = np.array(TEXTS, dtype=object)
        np.testing.assert_allclose(fit(texts, axes), fit(texts, {}), rtol=1e-5)

    def test_keras_takes_no_list_of_them_on_any_device(self):
        # As docs/numbers.md says.
        for axes in ({}, dict(data=2)):
            with self.assertRaisesRegex(ValueError, "Unrecognized data type"):
                fit(TEXTS, axes)
            with self.assertRaisesRegex(ValueError, "Invalid dtype: str"):
                fit(np.array(TEXTS), axes)
