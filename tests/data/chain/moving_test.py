"""A position is behind what was trained on, however training ends.

Fits of `steps_per_epoch=2` trained on the same two batches for ever.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tfscale
from tests import strategies
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


class FitTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        make=(tf.distribute.get_strategy, mesh), is_distributed=(False, True)
    )
    @pytest.mark.crossing(every=2)
    def test_fits_of_some_steps_go_on_with_the_next_batches(
        self, make, is_distributed
    ):
        strategy = make()
        model, train = compiled(strategy), pipeline()
        given = train
        if is_distributed:
            given = strategy.experimental_distribute_dataset(train)
        for number in range(1, 5):
            model.fit(given, steps_per_epoch=2, verbose=0)
            self.assertEqual(train.position.value, (5, 0, 8 * number))
            self.assertEqual(seen(model).sum(), 8 * number)
        model.fit(given, steps_per_epoch=2, verbose=0)
        self.assertEqual(train.position.value, (5, 1, 0))
        self.assertAllEqual(seen(model), np.ones(ROWS))

    @parameterized.parameters(tf.distribute.get_strategy, mesh)
    @pytest.mark.crossing(every=2)
    def test_several_steps_of_one_execution_count(self, make):
        model = compiled(make(), steps_per_execution=2)
        train = pipeline()
        model.fit(train, steps_per_epoch=4, verbose=0)
        self.assertEqual(train.position.value, (5, 0, 16))
        model.fit(train, steps_per_epoch=2, epochs=3, verbose=0)
        self.assertEqual(train.position.value, (5, 1, 0))

    @parameterized.parameters(tf.distribute.get_strategy, mesh)
    @pytest.mark.crossing(every=2)
    def test_a_callback_may_stop_it(self, make):
        model, train = compiled(make()), pipeline()
        model.fit(train, callbacks=[Stop(3)], verbose=0)
        self.assertEqual(train.position.value, (5, 0, 16))
        self.assertEqual(seen(model).sum(), 16)
        model.fit(train.take(train.batches_left), verbose=0)
        self.assertAllEqual(seen(model), np.ones(ROWS))
        self.assertEqual(train.position.value, (5, 1, 0))

    def test_it_goes_on_in_the_next_epoch(self):
        model, train = compiled(), pipeline()
        for _ in range(2):
            model.fit(train.repeat(), steps_per_epoch=15, verbose=0)
        self.assertEqual(train.position.value, (5, 3, 0))
        self.assertAllEqual(seen(model), np.full(ROWS, 3.0))

    def test_of_replicas_that_read_ahead_no_two_fits_are_the_same(self):
        # By as much as nobody is told.
        for strategy, of in (
            (strategies.mirrored(), lambda p: p),
            (mesh(), lambda p: p.repeat()),
        ):
            model, train = compiled(strategy), pipeline(remainder="pad")
            model.fit(of(train), steps_per_epoch=2, verbose=0)
            self.assertBetween(train.position.value.index, 8, 32)

    @parameterized.parameters(tf.distribute.get_strategy, mesh)
    @pytest.mark.crossing(every=3)
    def test_evaluation_begins_at_the_beginning(self, make):
        model = compiled(make(), rate=0.0)
        train, valid = pipeline(shuffle=False), pipeline(shuffle=False)
        whole = model.evaluate(valid, verbose=0)
        part = model.evaluate(valid, steps=2, verbose=0)
        epoch = valid.position.value.epoch
        for _ in range(2):
            self.assertEqual(model.evaluate(valid, steps=2, verbose=0), part)
            self.assertEqual(valid.position.value, (5, epoch, 0))
        model.fit(
            train,
            steps_per_epoch=1,
            epochs=3,
            validation_data=valid,
            validation_steps=2,
            verbose=0,
        )
        self.assertEqual(valid.position.value, (5, epoch, 0))
        self.assertEqual(train.position.value, (5, 0, 12))
        # Of what is being trained on, too, and then training goes on.
        self.assertAllClose(model.evaluate(train, verbose=0), whole, rtol=1e-6)
        self.assertLen(model.predict(train, verbose=0), ROWS)
        self.assertEqual(train.position.value, (5, 0, 12))


class LoopTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(tf.distribute.get_strategy, mesh)
    def test_a_loop_that_stops_goes_on_later(self, make):
        strategy = make()
        train = pipeline()
        given = strategy.experimental_distribute_dataset(train)
        seen = []
        for number in range(1, 5):
            for x, _ in itertools.islice(given, 2):
                parts = strategy.experimental_local_results(x)
                seen += np.concatenate(parts).ravel().tolist()
            self.assertEqual(train.position.value, (5, 0, 8 * number))
        self.assertLen(set(seen), 32)

    def test_one_batch_is_a_look(self):
        train = pipeline()
        first, _ = next(iter(train))
        for x, _ in train.take(1):
            self.assertAllEqual(x, first)
        iterator = iter(train)
        self.assertAllEqual(next(iterator)[0], first)
        next(iterator)
        # Another look, while an epoch goes on, holds nothing up.
        self.assertNotAllEqual(next(iter(train))[0], first)
        self.assertEqual(train.position.value, (5, 0, 8))
        self.assertLen(list(iterator), 8)
        self.assertEqual(train.position.value, (5, 1, 0))

    def test_what_was_set_meanwhile_stays(self):
        train = pipeline()
        iterator = iter(train)
        next(iterator)
        next(iterator)
        train.position.assign(epoch=3, index=4)
        self.assertLen(list(iterator), 8)
        self.assertEqual(train.position.value, (5, 3, 4))

    def test_an_epoch_of_one_batch_is_over_with_it(self):
        train = pipeline(rows=4)
        for epoch in (1, 2):
            next(iter(train))
            self.assertEqual(train.position.value, (5, epoch, 0))

    def test_batches_by_their_numbers_move_it(self):
        train, shown = pipeline(batch_size=2), []

        class Batches(keras.utils.PyDataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                x, y = next(self.batches)
                shown.append(x)
                return x, y

            def on_epoch_begin(self):
                self.batches = iter(train)

        model = compiled()
        for _ in range(2):
            given = Batches()
            given.on_epoch_begin()
            model.fit(given, shuffle=False, verbose=0)
            taken = 2 * len(shown)
            self.assertEqual(train.position.value, (5, 0, taken))
        self.assertLen(np.unique(shown), taken)

    @parameterized.parameters("keep", "drop", "pad")
    def test_workers_move_it_alike(self, remainder):
        for worker in range(2):
            train = pipeline(
                rows=38,
                remainder=remainder,
                input_context=tf.distribute.InputContext(2, worker, 2),
            )
            for number in range(1, train.cardinality() // 2):
                list(train.take(2))
                self.assertEqual(train.position.value, (5, 0, 8 * number))
            list(train)
            self.assertEqual(train.position.value, (5, 1, 0))


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
