"""Two `fit`s at a time, on the same devices, have the numbers of each alone."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale


def train(axes, seed):
    """The losses and the weights of a training of its own data."""
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(**axes))
    # The seeds of Keras are those of the process.
    made = keras.initializers.GlorotUniform(seed)
    layers = [
        keras.layers.Dense(8, "relu", kernel_initializer=made),
        keras.layers.Dense(1, kernel_initializer=made),
    ]
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), *layers])
        if "pipeline" in axes:
            model = tfscale.PipelineModel(
                model, num_microbatches=2, balance="params"
            )
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    draw = np.random.RandomState(seed)
    rows = tfscale.data.arrays(draw.randn(48, 4), draw.randn(48, 1))
    history = model.fit(
        tfscale.data.pipeline(rows, batch_size=8, seed=seed),
        epochs=3,
        verbose=0,
    )
    return history.history["loss"], model.get_weights()


class TwoFitsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (dict(data=2), dict(data=2)), (dict(data=2), dict(pipeline=2))
    )
    @pytest.mark.crossing(every=2)
    def test_in_threads_of_a_process(self, *meshes):
        expected = [train(axes, seed) for seed, axes in enumerate(meshes)]
        found = {}

        def work(seed, axes):
            found[seed] = train(axes, seed)

        threads = [
            threading.Thread(target=work, args=job) for job in enumerate(meshes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for seed, (losses, weights) in enumerate(expected):
            self.assertEqual(found[seed][0], losses)
            for one, other in zip(found[seed][1], weights, strict=True):
                self.assertAllEqual(one, other)


if __name__ == "__main__":
    tf.test.main()
