import itertools
import os
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tfscale
from tests import strategies
from tfscale import data
from tfscale.data.order import stream
from tfscale.data.order.position import Position
from tfscale.data.order.position import PositionValue
from tfscale.graphs import dataset_graph


class PositionTest(tf.test.TestCase, parameterized.TestCase):
    def test_three_integers_that_can_be_read_and_set(self):
        position = Position(seed=7)
        self.assertEqual(position.value, (7, 0, 0))
        position.assign(epoch=2, index=96)
        self.assertEqual(position.value, PositionValue(7, 2, 96))

    @parameterized.parameters({"epoch": -1}, {"index": -8})
    def test_negative_ones_are_refused(self, **kwargs):
        with self.assertRaisesRegex(ValueError, "0 or more"):
            Position(0).assign(**kwargs)

    def test_goes_into_a_checkpoint(self):
        position = Position(seed=7)
        position.assign(epoch=2, index=96)
        path = os.path.join(self.create_tempdir(), "checkpoint")
        saved = tf.train.Checkpoint(position=position).write(path)
        other = Position(seed=0)
        tf.train.Checkpoint(position=other).read(saved).assert_consumed()
        self.assertEqual(other.value, (7, 2, 96))

    def test_is_no_distributed_variable(self):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            pipeline = data.pipeline(data.arrays(np.arange(8)), batch_size=4)
            position = Position(3)
        self.assertEqual(position.value, (3, 0, 0))
        self.assertLen(list(pipeline), 2)

    def test_fit_moves_it_by_epochs(self):
        rows = np.ones([20, 2], "float32")
        pipeline = data.pipeline(data.arrays(rows, rows), batch_size=4)
        model = keras.Sequential([keras.layers.Dense(2)])
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(pipeline, epochs=3, verbose=0)
        self.assertEqual(pipeline.position.value, (0, 3, 0))
        self.assertEqual(model.optimizer.iterations, 15)

    def test_fit_continues_in_the_middle_of_an_epoch(self):
        rows = np.ones([22, 2], "float32")
        pipeline = data.pipeline(data.arrays(rows, rows), batch_size=4)
        pipeline.position.assign(epoch=1, index=12)
        self.assertEqual(pipeline.batches_left, 3)
        model = keras.Sequential([keras.layers.Dense(2)])
        model.compile("sgd", "mse", run_eagerly=True)
        # Keras would warn, and count a seventh and more steps, if it expected
        # a whole epoch; warnings are errors here.
        model.fit(pipeline.take(pipeline.batches_left), verbose=0)
        self.assertEqual(model.optimizer.iterations, 3)
        self.assertEqual(pipeline.position.value, (0, 2, 0))
        model.fit(pipeline, epochs=2, verbose=0)
        self.assertEqual(model.optimizer.iterations, 3 + 2 * 6)
        self.assertEqual(pipeline.position.value, (0, 4, 0))

    @parameterized.parameters(
        # A last batch that is kept cannot be cut for two replicas.
        ("keep", 1, 1),
        ("keep", 2, 1),
        *itertools.product(("drop", "pad"), (1, 2), (1, 2)),
    )
    @pytest.mark.crossing(every=5)
    def test_batches_left_are_those_that_come(
        self, remainder, workers, replicas
    ):
        rows = np.arange(22)
        context = tf.distribute.InputContext(workers, 0, workers * replicas)
        pipeline = data.pipeline(
            data.arrays(rows, rows),
            batch_size=4,
            remainder=remainder,
            input_context=context,
        )
        for index in (0, 4, 16, 20, 24):
            pipeline.position.assign(epoch=0, index=index)
            left = pipeline.batches_left
            self.assertLen(list(pipeline), left)

    @parameterized.parameters(
        ("keep", 2, 1),
        *itertools.product(("drop", "pad"), (1, 2), (1, 2)),
    )
    @pytest.mark.crossing(every=9)
    def test_steps_of_a_long_epoch_are_computed_in_chunks(
        self, remainder, workers, replicas
    ):
        # 610 MB were needed for the 3 million steps of an epoch.
        rows, found = np.arange(22), []
        for at_once in (2, 4096):
            with mock.patch.object(stream, "_STEPS_AT_ONCE", at_once):
                pipeline = data.pipeline(
                    data.arrays(rows, rows),
                    batch_size=4,
                    remainder=remainder,
                    input_context=tf.distribute.InputContext(
                        workers, workers - 1, workers * replicas
                    ),
                )
                batches = []
                for index in (0, 4, 12):
                    pipeline.position.assign(epoch=1, index=index)
                    for batch in pipeline:
                        batches.append((batch, pipeline.position.value))
                found.append(batches)
        self.assertGreater(len(found[0]), 2 * 3)
        for one, other in zip(*found, strict=True):
            self.assertAllEqual(one[0][0], other[0][0])
            self.assertEqual(one[1], other[1])

    def test_padding_changes_no_weighted_metric(self):
        rows = np.random.default_rng(0).normal(size=(22, 2)).astype("float32")
        padded = data.pipeline(
            data.arrays(rows, 2 * rows),
            batch_size=8,
            shuffle=False,
            remainder="pad",
        )
        model = keras.Sequential([keras.layers.Dense(2)])
        model.compile(
            loss="mse", weighted_metrics=["mse", "mae"], run_eagerly=True
        )
        _, *one = model.evaluate(padded, verbose=0)
        _, *other = model.evaluate(rows, 2 * rows, verbose=0)
        self.assertAllClose(one, other)

    def test_each_epoch_of_fit_sees_each_record_once(self):
        class Sum(keras.layers.Layer):
            def build(self, shape):
                self.seen = self.add_weight(
                    shape=[20], initializer="zeros", trainable=False
                )
                self.scale = self.add_weight(shape=[])

            def call(self, x):
                hot = keras.ops.one_hot(keras.ops.cast(x[:, 0], "int32"), 20)
                self.seen.assign_add(keras.ops.sum(hot, axis=0))
                return x * self.scale

        layer = Sum()
        model = keras.Sequential([layer])
        model.compile("sgd", "mse", run_eagerly=True)
        rows = np.arange(20.0, dtype="float32")[:, None]
        pipeline = data.pipeline(data.arrays(rows, rows), batch_size=4)
        model.fit(pipeline, epochs=3, verbose=0)
        self.assertAllEqual(layer.seen, np.full(20, 3.0))


class ResumedTrainingTest(tf.test.TestCase):
    def _train(self, parts):
        """Losses of steps, each part in a model and pipeline of its own."""
        keras.utils.set_random_seed(0)
        rows = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
        weights, losses = None, []
        for epoch, index, steps in parts:
            pipeline = data.pipeline(data.arrays(rows, rows), batch_size=4)
            pipeline.position.assign(epoch=epoch, index=index)
            model = keras.Sequential([keras.layers.Dense(3)])
            model.compile("sgd", "mse", run_eagerly=True)
            model.build((None, 3))
            if weights is not None:
                model.set_weights(weights)
            else:
                keras.utils.set_random_seed(1)
                model.set_weights(
                    [np.full(w.shape, 0.1, "float32") for w in model.weights]
                )
            for batch in pipeline.take(steps):
                losses.append(float(model.train_on_batch(*batch)))
                model.reset_metrics()
            weights = model.get_weights()
        return losses, weights

    def test_two_kills_in_one_epoch_change_no_weight(self):
        whole = self._train([(1, 0, 6)])
        broken = self._train([(1, 0, 2), (1, 8, 3), (1, 20, 1)])
        self.assertAllEqual(whole[0], broken[0])
        for one, other in zip(whole[1], broken[1], strict=True):
            self.assertAllEqual(one, other)


class DistributedTest(tf.test.TestCase, parameterized.TestCase):
    def test_replicas_share_a_global_batch_in_order(self):
        strategy = strategies.mirrored()
        pipeline = data.pipeline(data.arrays(np.arange(40)), batch_size=8)
        whole = list(pipeline.as_numpy_iterator())
        pipeline.position.assign(epoch=0)
        distributed = strategy.experimental_distribute_dataset(pipeline)
        for one, parts in zip(whole, distributed, strict=True):
            both = strategy.experimental_local_results(parts)
            self.assertLen(both, 2)
            self.assertAllEqual(one, tf.concat(both, 0))

    def test_no_worker_is_left_without_a_record_of_the_last_batch(self):
        # Of 25 records after those that other batch sizes have taken.
        for worker in range(2):
            pipeline = data.pipeline(
                data.arrays(np.arange(35)),
                batch_size=8,
                remainder="keep",
                input_context=tf.distribute.InputContext(2, worker, 2),
            )
            self.assertLen(list(pipeline), 5)
            pipeline.position.assign(epoch=1, index=10)
            with self.assertRaisesRegex(
                tf.errors.InvalidArgumentError,
                r"Every worker must get a record .* Received: 1 records in it "
                "for 2 workers, from record 10 of the epoch on",
            ):
                next(iter(pipeline))

    def test_workers_with_files_of_their_own_end_together(self):
        # Other batch sizes and positions were not looked at again: a worker
        # had a batch for which the others did not come.
        folder = self.create_tempdir().full_path
        for number, count in enumerate((10, 12)):
            path = os.path.join(folder, f"{number}.tfrecord")
            with tf.io.TFRecordWriter(path) as writer:
                for _ in range(count):
                    writer.write(b"record")
        for worker in range(2):
            pipeline = data.pipeline(
                data.tfrecords(os.path.join(folder, "*.tfrecord")),
                batch_size=8,
                shard="files",
                input_context=tf.distribute.InputContext(2, worker, 2),
            )
            self.assertLen(list(pipeline), 3)
            rule = r"as many batches as the others.* \[10, 12\] records"
            with self.assertRaisesRegex(ValueError, f"{rule}, from record 0"):
                pipeline.with_batch_size(4)
            pipeline.position.assign(epoch=1, index=4)
            with self.assertRaisesRegex(
                tf.errors.InvalidArgumentError, f"{rule}, from record 2 of each"
            ):
                next(iter(pipeline))

    @pytest.mark.crossing
    def test_from_function_with_files_of_its_own(self):
        folder = self.create_tempdir().full_path
        for number in range(4):
            path = os.path.join(folder, f"{number}.tfrecord")
            with tf.io.TFRecordWriter(path) as writer:
                for record in range(10 * number, 10 * number + 10):
                    writer.write(str(record).encode())

        def make(context):
            return data.pipeline(
                data.tfrecords(os.path.join(folder, "*.tfrecord")),
                parse=lambda r: tf.strings.to_number(r, tf.int64),
                batch_size=8,
                remainder="drop",
                input_context=context,
                shard="files",
            )

        strategy = strategies.mirrored()
        distributed = strategy.distribute_datasets_from_function(make)
        steps = [
            strategy.experimental_local_results(parts) for parts in distributed
        ]
        self.assertLen(steps, 5)
        self.assertEqual({len(part) for step in steps for part in step}, {4})
        records = np.concatenate([p for step in steps for p in step])
        self.assertCountEqual(records.tolist(), range(40))

        # Two workers: each opens its own files and no other's.
        for worker, files in ((0, (0, 2)), (1, (1, 3))):
            pipeline = make(tf.distribute.InputContext(2, worker, 4))
            seen = np.concatenate(list(pipeline.as_numpy_iterator()))
            self.assertEqual({int(r) // 10 for r in seen}, set(files))

    def test_fit_under_a_strategy_is_fit_on_one_device(self):
        rows = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
        weights = []
        for strategy in (tf.distribute.get_strategy(), strategies.mirrored()):
            with strategy.scope():
                model = keras.Sequential([keras.layers.Dense(3)])
                model.compile(keras.optimizers.SGD(0.1), "mse")
                model.build((None, 3))
            model.set_weights(
                [np.full(w.shape, 0.1, "float32") for w in model.weights]
            )
            pipeline = data.pipeline(data.arrays(rows, rows), batch_size=8)
            # Under a strategy of TensorFlow Keras looks at a batch of epoch 0.
            pipeline.position.assign(epoch=int(not weights))
            model.fit(pipeline, epochs=2, verbose=0)
            weights.append(model.get_weights())
        for one, other in zip(*weights, strict=True):
            self.assertAllClose(one, other, rtol=1e-5)


class LookedAtTest(tf.test.TestCase, parameterized.TestCase):
    """Under a strategy Keras makes an iterator only to look at a batch.

    On a mesh it gets the specs of a batch, and no epoch begins.
    """

    @parameterized.named_parameters(
        (
            "mirrored",
            strategies.mirrored,
            1,
            (4, lambda p, _: p),
            (8, lambda p, _: p.map(lambda x, y: (x, y)).prefetch(1)),
        ),
        (
            "mesh",
            lambda: tfscale.MeshStrategy(tfscale.device_mesh(data=2)),
            0,
            (
                4,
                lambda p, strategy: strategy.experimental_distribute_dataset(p),
            ),
            (16, lambda p, _: p.take(p.batches_left)),
        ),
    )
    @pytest.mark.crossing(every=2)
    def test_no_epoch_is_left_out(self, make, num_looks, *cases):
        strategy = make()
        models = []
        for scope in (strategy, tf.distribute.get_strategy()):
            with scope.scope():
                model = keras.Sequential(
                    [keras.Input((1,)), keras.layers.Dense(1)]
                )
                model.compile(keras.optimizers.SGD(1e-3), "mse")
            models.append(model)
        for num_rows, of in cases:
            rows = np.arange(num_rows, dtype="float32")[:, None]
            weights = []
            for model in models:
                pipeline = data.pipeline(
                    data.arrays(rows, 0 * rows), batch_size=4
                )
                model.set_weights([np.ones((1, 1)), np.zeros(1)])
                given = of(pipeline, strategy) if not weights else pipeline
                if weights:
                    pipeline.position.assign(epoch=num_looks)
                model.fit(given, epochs=2, verbose=0)
                expected = (0, 2 + num_looks, 0)
                self.assertEqual(pipeline.position.value, expected)
                weights.append(model.get_weights())
            for one, other in zip(*weights, strict=True):
                self.assertAllClose(one, other, rtol=1e-6)

    def test_no_batch_of_a_function_of_data_is_looked_at(self):
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=2))
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        rows = np.ones([8, 3], "float32")
        pipeline = data.pipeline(data.arrays(rows, rows), batch_size=2)
        given = strategy.distribute_datasets_from_function(lambda _: pipeline)
        model.fit(given, epochs=2, verbose=0)
        self.assertEqual(model.optimizer.iterations, 4)
        self.assertEqual(pipeline.position.value, (0, 2, 0))

    def test_what_is_not_looked_at_goes_on(self):
        rows = np.ones([8, 1], "float32")
        train, other = (
            data.pipeline(data.arrays(rows, rows), batch_size=4)
            for _ in range(2)
        )

        class Reading(keras.layers.Layer):
            """Ends an epoch of its own while Keras looks at another one."""

            def build(self, shape):
                with tf.init_scope():
                    self.read = len(list(other))

            def call(self, x):
                return x

        def model():
            with tf.distribute.OneDeviceStrategy("CPU:0").scope():
                model = keras.Sequential([Reading(), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            return model

        model().fit(train, verbose=0)
        self.assertEqual(other.position.value.epoch, 1)
        self.assertEqual(train.position.value.epoch, 2)  # with a look
        # There Keras looks at what it is given, and at no data.
        model().train_on_batch(rows, rows)
        self.assertEqual(other.position.value.epoch, 2)

    def test_it_is_no_function_of_python_to_explain_or_copy(self):
        pipeline = data.pipeline(data.arrays(np.arange(4)), batch_size=4)
        self.assertEqual(data.lint(pipeline), [])
        self.assertFalse(dataset_graph.calls_python(pipeline))


class ResumeAtTheEndTest(tf.test.TestCase, parameterized.TestCase):
    # How long it takes: `python -m benchmarks.input_pipeline.resume`.
    @parameterized.parameters("arrays", "tfrecords")
    def test_after_99968_of_100000_records_one_batch_is_left(self, kind):
        if kind == "arrays":
            source = data.arrays(np.arange(100_000))
        else:
            folder = self.create_tempdir().full_path
            for shard in range(4):
                path = os.path.join(folder, f"{shard}.tfrecord")
                with tf.io.TFRecordWriter(path) as writer:
                    for _ in range(25_000):
                        writer.write(b"record")
            source = data.tfrecords(os.path.join(folder, "*"))
        pipeline = data.pipeline(source, batch_size=32, cache="none")
        pipeline.position.assign(index=32 * 3124)
        self.assertLen(list(pipeline), 1)


if __name__ == "__main__":
    absltest.main()
