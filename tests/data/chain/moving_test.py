"""An iterator that is created later begins a later epoch.

Fits of `steps_per_epoch=2` trained on the same two batches for ever.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tfscale
from tfscale import data

ROWS = 40


class Seen(keras.layers.Layer):
    """Its weights count the records that it is trained on."""

    def build(self, shape):
        self.seen = self.add_weight(shape=[ROWS, 1], initializer="zeros")

    def call(self, x):
        hot = keras.ops.one_hot(keras.ops.cast(x[:, 0], "int32"), ROWS)
        return keras.ops.matmul(hot, self.seen)


def pipeline(rows=ROWS, **kwargs):
    x = np.arange(rows, dtype="float32")[:, None]
    kwargs = {"batch_size": 4, "seed": 5, **kwargs}
    return data.pipeline(data.arrays(x, x + 100.0), **kwargs)


def compiled(strategy=None, rate=1.0, **kwargs):
    # Of targets that are far away each record's gradient is -1.
    loss = keras.losses.MeanAbsoluteError(reduction="sum")
    with (strategy or tf.distribute.get_strategy()).scope():
        model = keras.Sequential([keras.Input((1,)), Seen()])
        model.compile(keras.optimizers.SGD(rate), loss, **kwargs)
    return model


def seen(model):
    return np.ravel(model.layers[0].seen)


class Stop(keras.callbacks.Callback):
    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == self.batch


def mesh():
    return tfscale.MeshStrategy(tfscale.device_mesh(data=2))


def order(epoch, count, **kwargs):
    """The first records of an epoch."""
    whole = pipeline(**kwargs)
    whole.position.assign(epoch=epoch)
    return np.concatenate([x for x, _ in whole])[:count, 0].astype(int)


class FitTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        make=(tf.distribute.get_strategy, mesh), is_distributed=(False, True)
    )
    @pytest.mark.crossing(every=4)
    def test_each_fit_of_some_steps_begins_a_later_epoch(
        self, make, is_distributed
    ):
        strategy = make()
        model, train = compiled(strategy), pipeline()
        given, expected = train, np.zeros(ROWS)
        if is_distributed:
            given = strategy.experimental_distribute_dataset(train)
        for number in range(4):
            # One step, too: it saw the same batch for ever.
            steps = 2 - number % 2
            model.fit(given, steps_per_epoch=steps, verbose=0)
            self.assertEqual(train.position.value, (5, number + 1, 0))
            expected[order(number, 4 * steps)] += 1
            self.assertAllEqual(seen(model), expected)
        model.fit(given, epochs=2, verbose=0)
        self.assertEqual(train.position.value, (5, 6, 0))
        self.assertAllEqual(seen(model), expected + 2)

    @parameterized.parameters(tf.distribute.get_strategy, mesh)
    @pytest.mark.crossing(every=2)
    def test_with_a_callback_that_counts_they_go_on(self, make):
        folder = self.create_tempdir().full_path
        for executed, given in ((1, lambda p: p), (2, lambda p: p.prefetch(1))):
            model = compiled(make(), steps_per_execution=executed)
            train = pipeline(shuffle=executed == 1)
            for number in range(1, 5):
                model.fit(
                    given(train),
                    steps_per_epoch=2,
                    callbacks=[tfscale.callbacks.BackupAndRestore(folder)],
                    verbose=0,
                )
                self.assertEqual(train.position.value, (5, 0, 8 * number))
                self.assertEqual(seen(model).sum(), 8 * number)
            model.fit(given(train), steps_per_epoch=2, verbose=0)
            self.assertEqual(train.position.value, (5, 1, 0))
            self.assertAllEqual(seen(model), np.ones(ROWS))

    def test_the_rest_of_an_epoch(self):
        model, train = compiled(), pipeline()
        backup = tfscale.callbacks.BackupAndRestore(
            self.create_tempdir().full_path
        )
        model.fit(train, callbacks=[Stop(3), backup], verbose=0)
        self.assertEqual(train.position.value, (5, 0, 16))
        model.fit(train.take(train.batches_left), verbose=0)
        self.assertAllEqual(seen(model), np.ones(ROWS))
        self.assertEqual(train.position.value, (5, 1, 0))

    def test_a_repeat_begins_an_epoch_each_time(self):
        model, train = compiled(), pipeline()
        for number in range(2):
            model.fit(train.repeat(), steps_per_epoch=15, verbose=0)
            self.assertEqual(train.position.value, (5, 2 * number + 2, 0))
        whole = np.full(ROWS, 2.0)
        for epoch in (1, 3):
            whole[order(epoch, 20)] += 1
        self.assertAllEqual(seen(model), whole)

    @parameterized.parameters(tf.distribute.get_strategy, mesh)
    @pytest.mark.crossing
    def test_data_in_a_fixed_order_is_evaluated_from_its_beginning(self, make):
        model = compiled(make(), rate=0.0)
        train, valid = pipeline(), pipeline(shuffle=False)
        whole = model.evaluate(valid, verbose=0)
        part = model.evaluate(valid, steps=2, verbose=0)
        self.assertNotAllClose(part, whole)
        self.assertEqual(model.evaluate(valid, steps=2, verbose=0), part)
        history = model.fit(
            train,
            steps_per_epoch=1,
            epochs=3,
            validation_data=valid,
            validation_steps=2,
            verbose=0,
        ).history
        self.assertAllEqual(history["val_loss"], [part] * 3)
        self.assertEqual(train.position.value, (5, 1, 0))
        # Of what is being trained on, too.
        self.assertAllClose(model.evaluate(train, verbose=0), whole, rtol=1e-6)
        self.assertLen(model.predict(train, verbose=0), ROWS)
        self.assertEqual(train.position.value, (5, 3, 0))


class LoopTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(tf.distribute.get_strategy, mesh)
    @pytest.mark.crossing(every=2)
    def test_a_loop_that_counts_goes_on_later(self, make):
        strategy = make()
        train = pipeline()
        given = strategy.experimental_distribute_dataset(train)
        found = []
        for number in range(1, 6):
            start = train.position.value
            for step, (x, _) in enumerate(given, 1):
                parts = strategy.experimental_local_results(x)
                found += np.concatenate(parts).ravel().tolist()
                here = train.position_after(start, step)
                train.position.assign(**here._asdict())
                if step == 2:
                    break
            self.assertEqual(
                train.position.value,
                (5, 0, 8 * number)[:3] if number < 5 else (5, 1, 0),
            )
        self.assertAllEqual(found, order(0, ROWS))

    def test_a_loop_in_a_graph_of_replicas_begins_an_epoch_each_time(self):
        strategy, train = mesh(), pipeline()
        given = strategy.experimental_distribute_dataset(train)

        @tf.function
        def total():
            found = 0.0
            for x, _ in given:
                found += strategy.reduce("SUM", x, axis=0)[0]
            return found

        for epoch in (1, 2, 3):
            self.assertEqual(total(), sum(range(ROWS)))
            self.assertEqual(train.position.value, (5, epoch, 0))

    def test_no_epoch_lacks_a_batch_that_was_looked_at(self):
        train = pipeline()
        for epoch, look in enumerate(
            (lambda: next(iter(train)), lambda: next(iter(train.take(1))))
        ):
            x, _ = look()
            self.assertAllEqual(x[:, 0], order(epoch, 4))
        model = compiled()
        model.fit(train, verbose=0)
        self.assertAllEqual(seen(model), np.ones(ROWS))
        iter(train)  # from which no batch is taken
        self.assertEqual(train.position.value, (5, 3, 0))

    def test_iterators_at_a_time_have_an_epoch_each(self):
        train = pipeline()
        both = [x for x in tf.data.Dataset.zip(train, train)]
        for number in range(2):
            found = [each[number][0][:, 0] for each in both]
            self.assertAllEqual(np.concatenate(found), order(number, ROWS))

    def test_what_was_set_meanwhile_stays(self):
        train = pipeline()
        iterator = iter(train)
        next(iterator)
        train.position.assign(epoch=3, index=4)
        self.assertLen(list(iterator), 9)
        self.assertEqual(train.position.value, (5, 3, 4))

    @parameterized.parameters("keep", "drop", "pad")
    @pytest.mark.crossing(every=3)
    def test_workers_move_it_alike(self, remainder):
        for worker in range(2):
            train = pipeline(
                rows=38,
                remainder=remainder,
                input_context=tf.distribute.InputContext(2, worker, 2),
            )
            list(train.take(2))
            self.assertEqual(train.position.value, (5, 1, 0))
            train.position.assign(epoch=1, index=8)
            self.assertLen(list(train), train.cardinality() - 2)
            self.assertEqual(train.position.value, (5, 2, 0))


class EndTest(tf.test.TestCase):
    def test_an_index_behind_the_end_is_refused(self):
        train = pipeline(rows=10)
        train.position.assign(index=12)  # the next epoch
        self.assertEqual(train.batches_left, 3)
        with self.assertRaisesRegex(ValueError, "index=13.*ends at 12"):
            train.position.assign(index=13)
        self.assertEqual(train.position.value, (5, 0, 12))

    def test_one_that_was_saved_of_other_data_is_refused(self):
        large, small = pipeline(), pipeline(rows=12)
        large.position.assign(index=36)
        path = tf.train.Checkpoint(position=large.position).write(
            f"{self.create_tempdir().full_path}/position"
        )
        tf.train.Checkpoint(position=small.position).read(path)
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, "after the end of an epoch"
        ):
            next(iter(small))


if __name__ == "__main__":
    absltest.main()
