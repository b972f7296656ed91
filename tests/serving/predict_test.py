"""`predict` and `evaluate` of a whole data set: the rows of one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale

NUM_ROWS = {"even": 16, "ragged": 13, "fewer_than_replicas": 1}
AXES = (
    {"data": 2},
    {"data": 4},
    {"pipeline": 2},
    {"model": 2},
    {"data": 2, "pipeline": 2},
    {"data": 2, "model": 2},
    {"pipeline": 2, "model": 2},
    {"data": 2, "pipeline": 2, "model": 2},
)
LAYOUTS = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}


def build():
    """Masks, statistics of BatchNormalization and two outputs."""
    keras.utils.set_random_seed(1)
    tokens = keras.Input((5,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(9, 8, mask_zero=True)(tokens)
    x = keras.layers.Dense(8, "tanh", name="up")(x)
    x = keras.layers.Dense(8, name="down")(x)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    kinds = keras.layers.Dense(3, "softmax", name="kinds")(x)
    sizes = keras.layers.Dense(1, name="sizes")(x)
    model = keras.Model(tokens, {"kinds": kinds, "sizes": sizes})
    random = np.random.RandomState(2)
    norm = model.get_layer("norm")
    norm.set_weights([random.uniform(0.5, 2.0, 8) for _ in range(4)])
    return model


def compiled(model):
    model.compile(
        loss={"kinds": "sparse_categorical_crossentropy", "sizes": "mse"},
        metrics={"kinds": ["accuracy"]},
        weighted_metrics={"sizes": ["mae"]},
    )
    return model


def on_mesh(axes):
    keras.utils.clear_session()
    mesh = tfscale.device_mesh(**axes)
    layouts = LAYOUTS if "model" in axes else None
    with tfscale.MeshStrategy(mesh, layouts).scope():
        model = build()
        if "pipeline" in axes:
            model = tfscale.PipelineModel(model, num_microbatches=2)
        return compiled(model)


def data_of(num_rows):
    random = np.random.RandomState(3)
    tokens = random.randint(0, 9, (num_rows, 5))
    tokens[:, 0] = 1  # no row is masked as a whole
    targets = {
        "kinds": random.randint(0, 3, num_rows),
        "sizes": random.normal(size=(num_rows, 1)),
    }
    weights = {
        "kinds": random.uniform(size=num_rows),
        "sizes": random.uniform(size=num_rows),
    }
    return tokens, targets, weights


def served(model, rows):
    tokens, targets, weights = data_of(NUM_ROWS[rows])
    metrics = model.evaluate(
        *(tokens, targets, 4),
        sample_weight=weights,
        return_dict=True,
        verbose=0,
    )
    return model.predict(tokens, batch_size=4, verbose=0), metrics


@functools.cache
def on_one_device(rows):
    keras.utils.clear_session()
    return served(compiled(build()), rows)


class PredictTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*AXES)
    @pytest.mark.crossing(every=8)
    def test_rows_and_metrics_of_one_device(self, **axes):
        model = on_mesh(axes)
        for rows in NUM_ROWS:
            with self.subTest(rows):
                outputs, metrics = on_one_device(rows)
                found_outputs, found_metrics = served(model, rows)
                self.assertAllClose(
                    found_outputs, outputs, rtol=1e-6, atol=1e-6
                )
                self.assertLen(found_outputs["sizes"], NUM_ROWS[rows])
                self.assertAllClose(
                    found_metrics, metrics, rtol=1e-6, atol=1e-6
                )


if __name__ == "__main__":
    tf.test.main()
