"""Weights of Keras have the optimizer's slots, from and for every mesh."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.backup import trainings

X = np.random.RandomState(0).normal(size=(16, 8)).astype("float32")
Y = X.sum(1, keepdims=True)
MESHES = {
    "plain": None,
    "data": dict(data=2),
    "zero 1": dict(data=2, zero_stage=1),
    "zero 3": dict(data=2, zero_stage=3),
    "pipeline": dict(pipeline=2),
    "model": dict(model=2),
    "all three": dict(data=2, pipeline=2, model=2),
}


def on_mesh(name):
    axes = dict(MESHES[name] or {})
    options = {key: axes.pop(key) for key in {*axes} & {"zero_stage"}}
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with (
        trainings.mesh_strategy(axes, options).scope()
        if axes
        else contextlib.nullcontext()
    ):
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, "tanh", name="up"),
                keras.layers.Dense(1, name="down"),
            ]
        )
        if "pipeline" in axes:
            model = tfscale.PipelineModel(
                model, num_microbatches=2, balance="params"
            )
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def fit(model, epochs):
    history = model.fit(
        *(X, Y), batch_size=8, epochs=epochs, shuffle=False, verbose=0
    )
    return history.history["loss"]


class SlotsInWeightsTest(tf.test.TestCase):
    def test_training_goes_on_as_if_it_had_not_ended(self):
        folder = self.create_tempdir().full_path
        expected = fit(on_mesh("plain"), len(MESHES))
        for index, name in enumerate(MESHES):
            model = on_mesh(name)
            if index:
                model.load_weights(f"{folder}/{index}.weights.h5")
                self.assertEqual(model.optimizer.iterations, 2 * index)
            # Without slots the momentum would be zero again.
            found = fit(model, 1)
            self.assertAllClose(found, expected[index : index + 1], rtol=1e-5)
            model.save_weights(f"{folder}/{index + 1}.weights.h5")


if __name__ == "__main__":
    tf.test.main()
