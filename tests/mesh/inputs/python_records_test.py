"""What a generator yields is the user's: replicas compute in memory of theirs.

They wrote over it, under TensorFlow's strategies too: after an epoch of slices
of an array, targets were differences of targets and predictions.
"""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest

import tfscale

X = np.random.RandomState(0).normal(size=(32, 3)).astype("float32")


def aligned(values):
    """The values where TensorFlow takes memory as it is."""
    memory = np.zeros(values.nbytes + 64, "uint8")
    start = -memory.ctypes.data % 64
    array = memory[start : start + values.nbytes].view(values.dtype)
    array = array.reshape(values.shape)
    array[:] = values
    return array


class GeneratorInputsTest(absltest.TestCase):
    def test_arrays_that_are_yielded_stay_as_they_are(self):
        y = aligned(X[:, :1])

        def batches():
            for i in range(0, 32, 16):
                yield X[i : i + 16], y[i : i + 16]

        with tfscale.MeshStrategy(tfscale.device_mesh(data=2)).scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        dataset = tf.data.Dataset.from_generator(
            batches,
            output_signature=(tf.TensorSpec((16, 3)), tf.TensorSpec((16, 1))),
        )
        model.fit(dataset, steps_per_epoch=2, verbose=0)
        np.testing.assert_array_equal(y, X[:, :1])


if __name__ == "__main__":
    absltest.main()
