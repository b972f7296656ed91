"""A saved run sees each record as often as one that is not saved."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfscale


class Recorder(keras.Model):
    """Trains on numbers, and records which."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = []

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        self.seen.append(data[0].numpy().ravel().astype(int).tolist())
        return super().train_step(data)


class Interrupted(Exception):
    pass


class DataPositionTest(parameterized.TestCase, tf.test.TestCase):
    def batches(self, of_pipeline, folder=None, interrupt_at=None, **arguments):
        """The batches that two epochs train on."""

        def interrupt(batch, logs):
            if len(model.seen) == interrupt_at:
                raise Interrupted

        numbers = np.arange(8, dtype="float32")[:, None]
        pipeline = tfscale.data.pipeline(
            tfscale.data.arrays(numbers, numbers), batch_size=4, seed=1
        )
        callbacks = [
            keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
        ]
        if folder is not None:
            callbacks.append(tfscale.callbacks.BackupAndRestore(folder, 1))
        model = Recorder()
        model.compile("sgd", "mse", run_eagerly=True)
        try:
            model.fit(
                of_pipeline(pipeline),
                epochs=2,
                verbose=0,
                callbacks=callbacks,
                **arguments,
            )
        except Interrupted:
            # Of the last step there is no save.
            model.seen.pop()
        return model.seen

    @parameterized.named_parameters(
        ("once", lambda x: x, {}),
        # The second epoch began with the second round of the first.
        ("repeated", lambda x: x.repeat(2), {}),
        ("repeated for steps", lambda x: x.repeat(), {"steps_per_epoch": 3}),
        ("prefetched", lambda x: x.prefetch(2), {}),
        ("mapped", lambda x: x.map(lambda *batch: batch), {}),
    )
    def test_records_of_a_pipeline_are_those_without_a_backup(
        self, of_pipeline, arguments
    ):
        expected = self.batches(of_pipeline, **arguments)
        folder = self.create_tempdir().full_path
        found = self.batches(of_pipeline, folder, **arguments)
        self.assertEqual(found, expected)
        middle = len(expected) // 2 + 1
        found = self.batches(of_pipeline, folder, middle, **arguments)
        found += self.batches(of_pipeline, folder, **arguments)
        self.assertEqual(found, expected)


if __name__ == "__main__":
    tf.test.main()
