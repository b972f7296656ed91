"""Losses and outputs that microbatches cannot have are refused."""

import keras
import numpy as np
from absl.testing import absltest

import tfscale
from tfscale.pipeline import PipelineModel

X = np.ones((4, 3, 2), "float32")


def pipeline(*layers, num_microbatches=2):
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=1))
    with strategy.scope():
        inputs = keras.Input(batch_shape=(4, 3, 2))
        model = keras.Sequential([inputs, *(make() for make in layers)])
        return PipelineModel(model, num_microbatches), strategy


class MicrobatchChecksTest(absltest.TestCase):
    def test_without_a_loss_there_is_nothing_to_train_by(self):
        # Training went on with a loss of 0, where Keras raises.
        model, strategy = pipeline(lambda: keras.layers.Dense(2))
        with strategy.scope():
            model.compile("sgd")
        with self.assertRaisesRegex(ValueError, "Pass `loss=` to `compile`"):
            model.train_on_batch(X, X)

    def test_an_output_without_rows_is_refused(self):
        # Of two microbatches it was there twice, or an error of `tf.split`;
        # keras_hub's SAM has one.
        table = keras.layers.Lambda(lambda x: x[:1], name="table")
        mean = keras.layers.Lambda(keras.ops.mean, name="table")
        for layer in (table, mean):
            model, _ = pipeline(lambda layer=layer: layer)
            with self.assertRaisesRegex(
                ValueError, r"a row for each row.*'table'.*num_microbatches=1"
            ):
                model.predict_on_batch(X)

    def test_of_an_unknown_number_of_rows_it_is_refused_too(self):
        # Of two microbatches it was there twice.
        model, _ = pipeline(lambda: keras.layers.Lambda(lambda x: x[0, :, 0]))
        with self.assertRaisesRegex(ValueError, "a row for each row"):
            model.predict_on_batch(X[:3])

    def test_one_microbatch_may_have_outputs_without_rows(self):
        # They were cut to as many rows as the batch has, or not sliceable.
        mean = keras.layers.Lambda(keras.ops.mean)
        table = keras.layers.Lambda(lambda x: keras.ops.mean(x, axis=0))
        for layer, shape in ((mean, ()), (table, (3, 2))):
            for rows in (4, 2):
                model, _ = pipeline(
                    lambda layer=layer: layer, num_microbatches=1
                )
                found = model.predict_on_batch(X[:rows])
                self.assertEqual(found.shape, shape)

    def test_an_output_may_have_several_rows_for_each(self):
        # It was cut to as many rows as the batch has.
        x = np.arange(30.0, dtype="float32").reshape(5, 3, 2)
        frames = keras.layers.Lambda(lambda x: keras.ops.reshape(x, (-1, 2)))
        model, _ = pipeline(lambda: frames, num_microbatches=4)
        for rows in (4, 5, 3, 1):
            found = model.predict_on_batch(x[:rows])
            np.testing.assert_array_equal(found, x[:rows].reshape(-1, 2))

    def test_a_stateful_layer_is_refused_in_words(self):
        for num_microbatches in (1, 2):
            with self.assertRaisesRegex(
                ValueError, "microbatches.*layer 'state' .*model itself"
            ):
                pipeline(
                    lambda: keras.layers.GRU(2, stateful=True, name="state"),
                    num_microbatches=num_microbatches,
                )
