"""Weights are loaded into a pipeline all or none, elsewhere as by Keras."""

import functools
import os
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale

UNITS = 8
X = np.random.RandomState(0).randn(8, UNITS).astype("float32")
ENDINGS = {
    "functional": (".weights.h5", ".keras", ".h5"),
    "subclassed": (".weights.h5", ".keras"),
    "pipeline": (".weights.h5", ".keras", ".h5"),
}
# What a model is that is another one, late in it.
OTHERS = {
    "wider": dict(hidden=16),
    "shallower": dict(blocks=1),
    "without_bias": dict(last_bias=False),
}


def layers_of(blocks=2, hidden=12, last_bias=True):
    """Blocks with sharded, whole, and moving variables, and a seed."""
    for n in range(blocks):
        # Only the last block is another one.
        units = hidden if n == blocks - 1 else 12
        yield keras.layers.Dense(units, activation="relu", name=f"up_{n}")
        yield keras.layers.Dropout(0.5, seed=n, name=f"drop_{n}")
        yield keras.layers.Dense(UNITS, name=f"down_{n}")
        yield keras.layers.BatchNormalization(name=f"norm_{n}")
    yield keras.layers.Dense(UNITS, use_bias=last_bias, name="last")


def functional(**kwargs):
    x = inputs = keras.Input((UNITS,))
    for layer in layers_of(**kwargs):
        x = layer(x)
    return keras.Model(inputs, x)


@keras.saving.register_keras_serializable("tfscale_tests")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__()
        self.kwargs = kwargs
        self.blocks = list(layers_of(**kwargs))

    def call(self, x, training=None):
        for layer in self.blocks:
            x = (
                layer(x, training=training)
                if "norm" in layer.name
                else layer(x)
            )
        return x

    def get_config(self):
        return self.kwargs


def subclassed(**kwargs):
    model = Subclassed(**kwargs)
    model(X)
    return model


def pipeline(**kwargs):
    return tfscale.PipelineModel(functional(**kwargs), 2, balance="params")


KINDS = {
    "functional": (functional, functional),
    "subclassed": (subclassed, subclassed),
    "pipeline": (pipeline, functional),
}


def on_mesh(kind, data=1, **kwargs):
    """A model that is like no plain one, without slots."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(2)
    mesh = tfscale.device_mesh(
        data=data, pipeline=2 if kind == "pipeline" else 1, model=2
    )
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*up_.*/kernel"] = (None, "model")
    layout_map[".*up_.*/bias"] = ("model",)
    layout_map[".*down_.*/kernel"] = ("model", None)
    with tfscale.MeshStrategy(mesh, layout_map, **kwargs).scope():
        model = KINDS[kind][0]()
        model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def trained_on_mesh(*args, **kwargs):
    """A model after a step, so that its slots are like no other as well."""
    model = on_mesh(*args, **kwargs)
    model.fit(X, X, batch_size=8, verbose=0)
    return model


@functools.cache
def plainly_trained(kind, name):
    """A plain model after a step, the same one or one of `OTHERS`."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    model = KINDS[kind][1](**OTHERS.get(name, {}))
    model.compile(keras.optimizers.Adam(0.1), "mse", run_eagerly=True)
    model.fit(X, X, batch_size=8, verbose=0)
    return model


def contents(model):
    """What each component of each variable holds."""
    return [
        component.numpy()
        for variable in model.variables + model.optimizer.variables
        for component in getattr(variable.value, "values", [variable.value])
    ]


class LoadWeightsTest(tf.test.TestCase, parameterized.TestCase):
    def saved(self, kind, ending, name="same"):
        """A file of a plain model that was trained, and what is in it."""
        model = plainly_trained(kind, name)
        path = os.path.join(self.create_tempdir().full_path, name + ending)
        if ending == ".weights.h5":
            model.save_weights(path)
        else:
            model.save(path)
        return path, model

    def check_refused(self, model, path, error=ValueError):
        before = contents(model)
        with self.assertRaisesRegex(
            error,
            "all of its weights or none. Received: "
            rf"'{re.escape(path)}', and from Keras: (.|\n)+"
            r"\nNothing was changed. Load a whole file of the same model",
        ):
            model.load_weights(path)
        for value, found in zip(before, contents(model), strict=True):
            np.testing.assert_array_equal(found, value)

    @pytest.mark.crossing
    def test_of_another_model_or_half_a_file_change_no_pipeline(self):
        model = trained_on_mesh("pipeline")
        for ending in ENDINGS["pipeline"]:
            for name in OTHERS:
                with self.subTest(f"{name}{ending}"):
                    path, _ = self.saved("pipeline", ending, name)
                    self.check_refused(model, path)
            with self.subTest(f"half{ending}"):
                path, _ = self.saved("pipeline", ending)
                os.truncate(path, os.path.getsize(path) // 2)
                zipped = ending == ".keras"
                self.check_refused(
                    model, path, ValueError if zipped else OSError
                )

    @pytest.mark.crossing
    def test_of_another_model_change_no_slots_that_replicas_divide(self):
        model = trained_on_mesh("pipeline", data=2, zero_stage=1)
        path, _ = self.saved("pipeline", ".keras", "wider")
        self.check_refused(model, path)

    @parameterized.parameters(*KINDS)
    @pytest.mark.crossing(every=3)
    def test_of_the_same_model_are_loaded(self, kind):
        model = trained_on_mesh(kind)
        for ending in ENDINGS[kind]:
            path, plain = self.saved(kind, ending)
            model.load_weights(path)
            for variable, expected in zip(
                model.weights, plain.weights, strict=True
            ):
                np.testing.assert_array_equal(np.array(variable), expected)

    def test_that_fit_are_loaded_where_others_are_skipped(self):
        model = on_mesh("functional")
        path, plain = self.saved("functional", ".weights.h5", "wider")
        last = [np.array(v) for v in model.get_layer("up_1").variables]
        with self.assertWarnsRegex(UserWarning, "could not be loaded"):
            model.load_weights(path, skip_mismatch=True)
        for name in ("up_0", "norm_1", "last"):
            for variable, expected in zip(
                model.get_layer(name).weights, plain.get_layer(name).weights
            ):
                np.testing.assert_array_equal(np.array(variable), expected)
        for variable, value in zip(model.get_layer("up_1").variables, last):
            np.testing.assert_array_equal(np.array(variable), value)

    def test_of_a_file_that_is_not_there_are_not_found(self):
        with tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2)).scope():
            model = pipeline()
        with self.assertRaisesRegex(FileNotFoundError, "no_such.weights.h5"):
            model.load_weights("no_such.weights.h5")


class OtherModelsTest(tf.test.TestCase):
    def test_keras_own_method_runs_once(self):
        # `keras.Model.load_weights` used to be replaced, for all models.
        method = keras.Model.load_weights
        model = on_mesh("functional")
        self.assertIs(keras.Model.load_weights, method)
        self.assertNotIn("tfscale", method.__module__)
        path = os.path.join(self.get_temp_dir(), "wider.weights.h5")
        functional(**OTHERS["wider"]).save_weights(path)
        loaded = []
        layer = model.get_layer("up_0")
        load = layer.load_own_variables
        layer.load_own_variables = lambda store: loaded.append(load(store))
        with warnings.catch_warnings():
            # Of a container, by Keras, because of the error.
            warnings.simplefilter("ignore")
            with self.assertRaisesRegex(ValueError, "^A total of 2 objects"):
                model.load_weights(path)
        self.assertLen(loaded, 1)


if __name__ == "__main__":
    tf.test.main()
