"""No epoch of a pipeline is skipped because its batches are read ahead.

See also position_test.py.
"""

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tfscale import data


def rows(batch_size=4, num_rows=12, **kwargs):
    return data.pipeline(
        data.arrays(
            np.arange(num_rows, dtype="float32")[:, None],
            np.ones((num_rows, 1), "float32"),
        ),
        batch_size=batch_size,
        seed=5,
        **kwargs,
    )


def negated_by_python(x, y):
    negated = tf.numpy_function(np.negative, [x], tf.float32)
    return tf.ensure_shape(negated, x.shape), y


class PlacedInputsTest(tf.test.TestCase):
    def test_fit_begins_with_the_first_epoch_and_leaves_none_out(self):
        def fit(strategy, *callbacks):
            with strategy.scope():
                model = keras.Sequential(
                    [keras.Input((1,)), keras.layers.Dense(1)]
                )
                model.compile(keras.optimizers.SGD(1e-3), "mse")
            model.set_weights([np.ones((1, 1)), np.zeros(1)])
            pipeline = rows()
            model.fit(pipeline, epochs=2, verbose=0, callbacks=callbacks)
            self.assertEqual(pipeline.position.value, (5, 2, 0))
            return model.get_weights()

        mesh = tfscale.device_mesh(data=2)
        expected = fit(tf.distribute.get_strategy())
        # It sets positions by itself.
        backup = tfscale.callbacks.BackupAndRestore(
            self.create_tempdir().full_path
        )
        found = fit(tfscale.MeshStrategy(mesh), backup)
        for one, other in zip(found, expected, strict=True):
            self.assertAllClose(one, other, rtol=1e-6)

    def test_a_parse_of_python_moves_it_no_further_than_steps_are(self):
        # Records of Python are copied, and what was copied was a pipeline that
        # counted the batches which were read ahead: two steps too many.
        with tfscale.MeshStrategy(tfscale.device_mesh(data=2)).scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        with self.assertWarnsRegex(UserWarning, "A map calls Python"):
            pipeline = rows(num_rows=40, parse=negated_by_python)
        found = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: found.append(
                pipeline.position.value.index
            )
        )
        model.fit(pipeline, verbose=0, callbacks=[note])
        # The first batch of an iterator moves it with the second.
        self.assertEqual(found, [0, *range(8, 40, 4), 0])
        self.assertEqual(pipeline.position.value, (5, 1, 0))

    def test_an_epoch_that_was_taken_is_over_also_without_its_end(self):
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=2))
        pipeline = rows()
        distributed = strategy.experimental_distribute_dataset(pipeline)
        self.assertIsInstance(distributed, tf.distribute.DistributedDataset)
        iterator = iter(distributed)
        for _ in range(3):
            next(iterator)
        iter(distributed)
        self.assertEqual(pipeline.position.value.epoch, 1)
        whole = rows(batch_size=12)
        distributed_whole = strategy.experimental_distribute_dataset(whole)
        for epoch in (1, 2):
            next(iter(distributed_whole))
            iter(distributed_whole)
            self.assertEqual(whole.position.value.epoch, epoch)
        iterator = iter(distributed)
        next(iterator)
        pipeline.position.assign(epoch=2, index=0)  # is what counts
        iter(distributed)
        self.assertEqual(pipeline.position.value.epoch, 2)


if __name__ == "__main__":
    tf.test.main()
