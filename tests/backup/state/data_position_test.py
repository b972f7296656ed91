"""A saved run sees each record as often as one that is not saved."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale


class Recorder(keras.Model):
    """Trains and is evaluated on numbers, and records which."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = []

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        self.record(data)
        return super().train_step(data)

    def test_step(self, data):
        self.record(data)
        return super().test_step(data)

    def record(self, data):
        self.seen.append(data[0].numpy().ravel().astype(int).tolist())


class Interrupted(Exception):
    pass


def numbered(pipeline):
    zipped = tf.data.Dataset.zip(pipeline, tf.data.Dataset.range(99))
    return zipped.map(lambda batch, number: batch)


class DataPositionTest(parameterized.TestCase, tf.test.TestCase):
    def batches(
        self,
        of_pipeline,
        folder=None,
        interrupt_at=None,
        of_validation=None,
        steps_per_execution=1,
        epochs=3,
        **arguments,
    ):
        """The batches that a `fit` trains and is evaluated on."""

        def interrupt(batch, logs):
            if len(model.seen) == interrupt_at:
                raise Interrupted

        def pipeline(first, seed):
            numbers = first + np.arange(8, dtype="float32")[:, None]
            source = tfscale.data.arrays(numbers, numbers)
            return tfscale.data.pipeline(source, batch_size=4, seed=seed)

        if of_validation is not None:
            validation = of_validation(pipeline(100, seed=2))
            arguments["validation_data"] = validation
        callbacks = [
            keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
        ]
        if folder is not None:
            callbacks.append(tfscale.callbacks.BackupAndRestore(folder, 1))
        model = Recorder()
        model.compile(
            *("sgd", "mse"),
            run_eagerly=True,
            steps_per_execution=steps_per_execution,
        )
        try:
            model.fit(
                of_pipeline(pipeline(0, seed=1)),
                epochs=epochs,
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
        # Which began with the first epoch again after an interruption.
        ("zipped", numbered, {}),
        ("concatenated", lambda x: x.concatenate(x), {}),
    )
    @pytest.mark.crossing(every=7)
    def test_records_of_a_pipeline_are_those_without_a_backup(
        self, of_pipeline, arguments
    ):
        self.assert_same_batches(of_pipeline, **arguments)

    def test_a_validation_of_repeated_data_goes_on_with_the_next_epoch(self):
        # After the interruption it was the same epoch again and again: in the
        # middle of one, where it was thought to be, it is not moved on.
        self.assert_same_batches(
            lambda x: x,
            of_validation=lambda x: x.repeat(),
            validation_steps=3,
        )

    @pytest.mark.crossing
    def test_a_validation_of_repeated_data_goes_on_on_replicas(self):
        # They read ahead: the next one begins some epochs later, which a run
        # that went on did not know.
        def losses(folder, interrupt_at=None):
            def interrupt(batch, logs):
                steps.append(batch)
                if len(steps) == interrupt_at:
                    raise Interrupted

            def pipeline(count, seed):
                x = np.arange(count, dtype="float32")[:, None]
                source = tfscale.data.arrays(x, x**3)
                return tfscale.data.pipeline(source, batch_size=4, seed=seed)

            steps = []
            with tfscale.MeshStrategy(tfscale.device_mesh(data=2)).scope():
                dense = keras.layers.Dense(1, kernel_initializer="zeros")
                model = keras.Sequential([keras.Input((1,)), dense])
                model.compile(keras.optimizers.SGD(0.0), "mse")
            fit = model.fit(
                pipeline(8, seed=1),
                epochs=5,
                validation_data=pipeline(12, seed=2).repeat(),
                validation_steps=2,
                verbose=0,
                callbacks=[
                    keras.callbacks.LambdaCallback(
                        on_train_batch_end=interrupt
                    ),
                    tfscale.callbacks.BackupAndRestore(folder, 1),
                ],
            )
            return fit.history["val_loss"]

        folder = self.create_tempdir().full_path
        expected = losses(f"{folder}/whole")
        self.assertGreater(np.ptp(expected), 0.0)
        with self.assertRaises(Interrupted):
            losses(f"{folder}/runs", interrupt_at=6)
        self.assertEqual(losses(f"{folder}/runs"), expected)

    @pytest.mark.filterwarnings("ignore:Your input ran out of data")
    @pytest.mark.crossing
    def test_a_validation_of_unknown_length_goes_on_with_the_next_epoch(self):
        # Keras makes its next iterator when that begins, and not before.
        self.assert_same_batches(
            lambda x: x, of_validation=lambda x: x.unbatch().batch(3)
        )

    def test_a_pipeline_ends_where_it_did_after_two_interruptions(self):
        # Keras renews its iterator after as many steps as there are batches.
        # It counted from the first interruption on, and an epoch had no step.
        def smaller(pipeline):
            return pipeline.with_batch_size(2)

        arguments = {"steps_per_epoch": 2}
        expected = self.batches(smaller, **arguments)
        folder = self.create_tempdir().full_path
        found = []
        for interrupt_at in (2, 2, 3, None):
            found += self.batches(smaller, folder, interrupt_at, **arguments)
        self.assertEqual(found, expected)

    @pytest.mark.crossing
    def test_a_pipeline_goes_on_in_executions_of_any_size(self):
        # One of two batches, the first of which was trained on, was skipped.
        folder = self.create_tempdir().full_path

        def one(pipeline):
            return pipeline.with_batch_size(1)

        found = self.batches(one, folder, interrupt_at=4)
        found += self.batches(one, folder, steps_per_execution=2)
        self.assertEqual(found, self.batches(one))

    @parameterized.parameters(lambda x: x.repeat(2), lambda x: x)
    @pytest.mark.crossing(every=2)
    def test_an_iterator_of_many_epochs_goes_on_in_batches_of_any_size(
        self, change
    ):
        # Keras renewed it after as many steps as it had in the earlier size.
        folder = self.create_tempdir().full_path
        arguments = {"steps_per_epoch": 2, "epochs": 6}

        def of_size(size):
            return lambda x: change(x.with_batch_size(size))

        found = self.batches(of_size(1), folder, interrupt_at=5, **arguments)
        found += self.batches(of_size(2), folder, **arguments)
        expected = np.ravel(self.batches(of_size(1))[:20])
        self.assertEqual(np.concatenate(found).tolist(), expected.tolist())

    def assert_same_batches(self, *data, **arguments):
        expected = self.batches(*data, **arguments)
        folder = self.create_tempdir().full_path
        found = self.batches(*data, folder, **arguments)
        self.assertEqual(found, expected)
        found = self.batches(*data, folder, interrupt_at=6, **arguments)
        found += self.batches(*data, folder, **arguments)
        self.assertEqual(found, expected)


if __name__ == "__main__":
    tf.test.main()
