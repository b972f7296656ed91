"""What backups rely on in a `fit` of Keras, and in its callbacks."""

import contextlib
import itertools
import os
import random
import types

import keras
import numpy as np
import tensorflow as tf

from tests._internals.contracts import holds
from tfscale._internals import attributes
from tfscale._internals import datasets
from tfscale._internals import fitting
from tfscale._internals import releases
from tfscale._internals import stack
from tfscale._internals import symbols
from tfscale.adapters import py_dataset
from tfscale.adapters.epochs import follow

# Names that Keras 3.15 has not.
NEW = () if releases.IS_3_15 else ("_epoch",)
X = np.reshape(np.arange(8.0, dtype="float32"), (4, 2))


def compiled():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    return model


class Watching(keras.callbacks.Callback):
    """Looks into the `fit` that it is a callback of, with a function."""

    def __init__(self, look):
        super().__init__()
        self.look = look
        self.found = []

    def on_train_begin(self, logs=None):
        self.found.append(self.look(*fitting.running_fit(self.model)))


def found_in_fit(look, x=X, **kwargs):
    callback = Watching(look)
    compiled().fit(
        x,
        None if isinstance(x, tf.data.Dataset) else X[:, :1],
        callbacks=[callback],
        verbose=0,
        **kwargs,
    )
    return callback.found[0]


class FitTest(tf.test.TestCase):
    @holds("EpochIterator.__init__", "_num_batches")
    def test_the_epochs_and_callbacks_are_variables_of_fit(self):
        def look(epochs, callbacks):
            self.assertIsInstance(epochs, symbols.TFEpochIterator)
            (fit,) = [c for c in stack.calls() if c.purpose == "fit"]
            self.assertIs(fit.epochs, epochs)
            self.assertIs(fit.callbacks, callbacks)
            kinds = [type(c) for c in callbacks.callbacks]
            self.assertIn(Watching, kinds)
            return epochs

        epochs = found_in_fit(look, batch_size=2)
        self.assertEqual(fitting.known_batches(epochs), 2)
        fitting.set_known_batches(epochs, 7)
        self.assertEqual(epochs.num_batches, 7)
        self.assertEmpty(stack.calls())

    @holds("TFEpochIterator", "_get_iterator")
    @holds("EpochIterator.__init__", "_current_iterator", "_steps_seen")
    def test_an_epoch_makes_its_iterator_by_one_method_and_keeps_it(self):
        calls = []

        class Watcher:
            def iterator_made(self):
                calls.append("iterator")

            def begin_epoch(self):
                calls.append("epoch")
                return 1

            def skip(self, iterator):
                calls.append(("skipped", next(iterator)[0].numpy()[0, 0]))

            def between_steps(self, step, iterator):
                calls.append(step)

        def look(epochs, callbacks):
            follow(epochs, watcher=Watcher())
            return epochs

        found_in_fit(look, batch_size=2, shuffle=False)
        self.assertEqual(calls[:4], ["epoch", "iterator", ("skipped", 0.0), 1])

        def go_on(epochs, callbacks):
            iterator = fitting.make_iterator(epochs)
            next(iterator)
            fitting.go_on_with(epochs, iterator, 1)
            return epochs, iterator

        epochs, iterator = found_in_fit(
            go_on,
            tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(1),
            steps_per_epoch=2,
        )
        self.assertIs(epochs._current_iterator, iterator)
        self.assertEqual(epochs._steps_seen, 3)
        self.assertAllEqual(next(iterator)[0], X[3:])

    def test_an_epoch_that_begins_may_get_other_data(self):
        rows = tf.data.Dataset.from_tensor_slices((X, X[:, :1]))
        counts = []

        class Change(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                running = fitting.running_fit(self.model)
                fitting.give_data(*running, rows.batch(1 + epoch))
                counts.append(0)

            def on_train_batch_end(self, batch, logs=None):
                counts[-1] += 1

        compiled().fit(rows.batch(4), epochs=2, callbacks=[Change()], verbose=0)
        self.assertEqual(counts, [4, 2])

        class Watcher:
            """As a backup does: behind the beginning of the epoch."""

            def iterator_made(self):
                pass

            def begin_epoch(self):
                fitting.give_data(*running, rows.batch(2))
                return 0

            def between_steps(self, step, iterator):
                counts.append(step)

        def look(*found):
            nonlocal running
            running = found
            follow(found[0], watcher=Watcher())
            return found

        running = ()
        counts.clear()
        found_in_fit(look, rows.batch(4))
        self.assertEqual(counts, [0, 1])

    @holds("TFDatasetAdapter.__init__", "_dataset")
    @holds("ArrayDataAdapter.__init__", "_shuffle")
    @holds("TFEpochIterator.__init__", "_distributed_dataset")
    def test_the_data_is_known(self):
        dataset = tf.data.Dataset.from_tensors((X, X[:, :1]))

        def look(epochs, callbacks):
            return (
                fitting.source_of(epochs),
                fitting.shuffles_arrays(epochs),
                fitting.element_spec_of(epochs),
            )

        source, shuffles, spec = found_in_fit(look, dataset)
        self.assertEqual(source.element_spec, dataset.element_spec)
        self.assertFalse(shuffles)
        self.assertEqual(spec[0].shape, X.shape)
        for shuffle in (False, True):
            _, shuffles, _ = found_in_fit(look, shuffle=shuffle)
            self.assertEqual(shuffles, shuffle)

    @holds("ArrayDataAdapter.__init__", "_shuffle")
    def test_how_arrays_are_batched_is_known(self):
        def look(epochs, callbacks):
            return fitting.rows_of_arrays(epochs)

        for size, last in ((2, 2), (3, 1)):
            found = found_in_fit(look, batch_size=size, shuffle=False)
            rows = f"of {size} rows, the last {last}"
            self.assertEqual(found, [rows, "in order"])
        dataset = tf.data.Dataset.from_tensors((X, X[:, :1]))
        self.assertEqual(found_in_fit(look, dataset), [])

    @holds("DistributedDataset.__init__", "_original_dataset")
    def test_the_source_of_a_distributed_dataset_is_known(self):
        dataset = tf.data.Dataset.from_tensors((X, X[:, :1]))
        strategy = tf.distribute.OneDeviceStrategy("CPU:0")
        adapter = types.SimpleNamespace(
            _dataset=strategy.experimental_distribute_dataset(dataset)
        )
        epochs = types.SimpleNamespace(data_adapter=adapter)
        self.assertIs(fitting.source_of(epochs), dataset)

    @holds("DistributedDataset.__init__", "_strategy")
    @holds("DistributedDataset", "_make_rebatch_fn")
    def test_batches_are_read_ahead_after_they_are_cut_for_replicas(self):
        dataset = tf.data.Dataset.range(4).batch(2)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        made = strategy.experimental_distribute_dataset(dataset)
        self.assertIs(made._strategy, strategy)
        ahead = made._make_rebatch_fn(dataset, 1, 2)(dataset, 0)
        (cut,) = datasets.inputs_of(ahead)
        self.assertEqual(
            [rows.tolist() for rows in cut.as_numpy_iterator()],
            [[0], [1], [2], [3]],
        )

    @holds("PyDatasetAdapter.__init__", "enqueuer", "shuffle")
    def test_data_of_python_is_known_by_its_adapter(self):
        class Rows(keras.utils.PyDataset):
            def __len__(self):
                return len(X)

            def __getitem__(self, i):
                return X[i : i + 1], X[i : i + 1]

        found = [
            symbols.TFEpochIterator(
                x=data,
                shuffle=True,
                distribute_strategy=tf.distribute.get_strategy(),
            )
            for data in (
                Rows(workers=2),
                Rows(),
                ((row[None], row[None]) for row in X),
                X,
            )
        ]
        self.assertEqual(
            [fitting.is_of_python(epochs) for epochs in found],
            [True, True, True, False],
        )
        self.assertTrue(found[0].data_adapter.shuffle)
        self.assertFalse(found[0].data_adapter.enqueuer.is_running())
        self.assertIsNone(found[1].data_adapter.enqueuer)

    @holds("PyDatasetAdapter.__init__", "py_dataset")
    @holds("PyDatasetAdapter._get_iterator", "_finite_generator")
    @holds("PyDatasetAdapter._finite_generator", "_standardize_batch")
    @holds("OrderedEnqueuer._run", "shuffle", "indices")
    @holds("ArrayDataAdapter.__init__", *NEW)
    def test_arrays_are_shuffled_by_the_number_of_an_epoch_if_by_any(self):
        def read(epoch):
            epochs = symbols.TFEpochIterator(
                x=np.arange(64),
                shuffle=True,
                distribute_strategy=tf.distribute.get_strategy(),
            )
            adapter = epochs.data_adapter
            releases.set_epoch_of_order(adapter, epoch)
            batches = [keras.tree.flatten(x) for x in adapter.get_tf_dataset()]
            return releases.epoch_of_order(adapter), tf.concat(batches, 1)[0]

        tf.random.set_seed(None)
        (three, order), (_, same), (_, other) = read(3), read(3), read(4)
        self.assertEqual(three, None if releases.IS_3_15 else 3)
        self.assertEqual(np.array_equal(order, same), not releases.IS_3_15)
        self.assertNotAllEqual(order, other)

    @holds("PyDatasetAdapter.__init__", *NEW)
    def test_the_order_of_a_py_dataset_is_known_and_can_be_set(self):
        class Rows(keras.utils.PyDataset):
            def __len__(self):
                return 8

            def __getitem__(self, i):
                return np.full((1, 1), i), np.full((1, 1), i)

        for workers in (1, 2):
            epochs = symbols.TFEpochIterator(
                x=Rows(workers=workers),
                shuffle=True,
                distribute_strategy=tf.distribute.get_strategy(),
            )
            adapter = epochs.data_adapter

            def read(adapter=adapter):
                adapter.on_epoch_begin()
                rows = [int(x[0, 0]) for x, _ in adapter.get_numpy_iterator()]
                adapter.on_epoch_end()
                return rows

            random.seed(4)
            plain = [read(), read()]
            py_dataset.keep_order(epochs)
            random.seed(4)
            releases.set_epoch_of_order(epochs.data_adapter, 0)
            for rows in plain:
                self.assertEqual(read(), rows)
                self.assertEqual(py_dataset.order_of(epochs, True), rows)
            state = random.getstate()
            py_dataset.set_order(epochs, plain[0])
            self.assertEqual(read(), plain[0])
            self.assertEqual(random.getstate(), state)
            self.assertNotEqual(read(), plain[0])

    @holds("Model.fit", "_initial_epoch")
    def test_a_fit_begins_where_it_is_told_and_keeps_its_validation(self):
        model, epochs = compiled(), []

        class Noting(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                epochs.append(epoch)

            def on_epoch_end(self, epoch, logs=None):
                epochs.append(fitting.validation_epochs(self.model))

            def on_test_begin(self, logs=None):
                found = fitting.validation_epochs(self.model)
                epochs.append(isinstance(found, symbols.TFEpochIterator))

        fitting.set_initial_epoch(model, 2)
        model.fit(
            X,
            X[:, :1],
            epochs=3,
            validation_data=(X, X[:, :1]),
            callbacks=[Noting()],
            verbose=0,
        )
        self.assertEqual(epochs, [2, True, None])
        # Of no validation of a `fit`.
        model.evaluate(X, X[:, :1], callbacks=[Noting()], verbose=0)
        self.assertFalse(epochs[-1])

    def test_under_a_strategy_keras_looks_at_a_batch_before_it_evaluates(self):
        made = []

        class Dataset(tf.data.Dataset):
            def __init__(self, dataset):
                self._dataset = dataset
                super().__init__(tf.data.experimental.to_variant(dataset))

            def _inputs(self):
                return [self._dataset]

            element_spec = property(lambda self: self._dataset.element_spec)

            def __iter__(self):
                made.append(self)
                return super().__iter__()

        class Noting(keras.callbacks.Callback):
            def on_test_begin(self, logs=None):
                counts.append(len(made))

        counts = []
        for strategy in (None, tf.distribute.OneDeviceStrategy("CPU:0")):
            with strategy.scope() if strategy else contextlib.nullcontext():
                model = compiled()
            dataset = Dataset(
                tf.data.Dataset.from_tensors((X, X[:, :1])).repeat(2)
            )
            epochs = symbols.TFEpochIterator(
                x=dataset, distribute_strategy=model.distribute_strategy
            )
            self.assertEqual(fitting.probes_data(model, epochs), bool(strategy))
            made.clear()
            model.evaluate(dataset, callbacks=[Noting()], verbose=0)
        self.assertEqual(counts[0], 0)

    @holds("tensorflow.trainer", "TFEpochIterator")
    def test_a_strategy_knows_the_call_that_it_serves(self):
        found = []

        def note():
            call = fitting.keras_call()
            if call is not None:
                reads = fitting.is_read_by(strategy.data, call)
                found.append((call.purpose, call.stage, reads))
            return call

        class Data:
            """A distributed dataset that notes who reads it."""

            def __init__(self, dataset):
                self.dataset = dataset
                self.element_spec = dataset.element_spec

            def __iter__(self):
                note()
                return iter(self.dataset)

        class Strategy(tf.distribute.OneDeviceStrategy):
            data = None

            def experimental_distribute_dataset(self, dataset, options=None):
                call = note()
                created.append(call.epochs.data_adapter)
                self.data = Data(dataset)
                return self.data

            def scope(self):
                note()
                return super().scope()

        created = []
        strategy = Strategy("CPU:0")
        with strategy.scope():
            model = compiled()
        dataset = tf.data.Dataset.from_tensors((X, X[:, :1]))
        for method, stages in (
            (model.fit, ("create", "probe", "run")),
            (model.evaluate, ("create", "probe", "run")),
            (model.predict, ("create", "run")),
        ):
            found.clear()
            method(dataset, verbose=0)
            name = method.__name__
            self.assertEqual(
                [each for each, _ in itertools.groupby(found)],
                [(name, stage, stage != "create") for stage in stages],
            )
        found.clear()
        model.train_on_batch(X, X[:, :1])
        self.assertEqual(
            [each for each, _ in itertools.groupby(found)],
            [(None, "probe", False), (None, "run", False)],
        )
        created.clear()
        model.fit(
            dataset,
            validation_data=dataset.repeat(2),
            validation_steps=1,
            verbose=0,
        )
        self.assertLen(set(map(id, created)), 2)
        self.assertIsNone(fitting.keras_call())

    @holds("seed_generator", "GLOBAL_SEED_GENERATOR")
    def test_layers_without_a_seed_draw_from_one_generator(self):
        keras.utils.clear_session()
        self.assertIsNone(attributes.used_seed_generator())
        keras.random.uniform(())
        generator = attributes.used_seed_generator()
        before = generator.state.numpy()
        keras.random.normal((1,))
        self.assertIs(attributes.used_seed_generator(), generator)
        self.assertNotAllEqual(generator.state, before)

    @holds("stateful_random_ops", "global_generator")
    def test_the_global_generator_is_there_once_it_is_used(self):
        before = attributes.global_generator()
        self.addCleanup(tf.random.set_global_generator, before)
        tf.random.set_global_generator(None)
        self.assertIsNone(attributes.global_generator())
        generator = tf.random.get_global_generator()
        self.assertIs(attributes.global_generator(), generator)


class CallbacksTest(tf.test.TestCase):
    @holds(
        "ModelCheckpoint.__init__",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    )
    def test_a_checkpoint_is_due_by_its_counters(self):
        path = os.path.join(self.get_temp_dir(), "{epoch}.weights.h5")
        callback = keras.callbacks.ModelCheckpoint(
            path, save_weights_only=True, save_freq=3
        )
        callback.set_model(compiled())
        callback.on_epoch_begin(4)
        callback._last_batch_seen = 1
        callback._batches_seen_since_last_saving = 2
        callback.on_train_batch_end(2, {})
        self.assertTrue(os.path.exists(path.format(epoch=5)))
        self.assertEqual(
            [getattr(callback, n) for n in fitting.MODEL_CHECKPOINT_COUNTERS],
            [0, 2],
        )

    @holds("SwapEMAWeights.__init__", "_ema_weights_in_model")
    def test_who_has_the_averages_is_known(self):
        model = compiled()
        model.compile(keras.optimizers.SGD(use_ema=True), "mse")
        model.optimizer.build(model.trainable_variables)
        callback = keras.callbacks.SwapEMAWeights()
        callback.set_model(model)
        (name,) = fitting.SWAP_EMA_STATE
        self.assertFalse(getattr(callback, name))
        callback.on_test_begin()
        self.assertTrue(getattr(callback, name))

    @holds("TensorBoard._init_profile_batch", "_should_trace")
    def test_tensorboard_says_whether_it_profiles(self):
        for batch, expected in ((0, False), (3, True), ((2, 4), True)):
            callback = keras.callbacks.TensorBoard(
                self.create_tempdir().full_path, profile_batch=batch
            )
            self.assertEqual(fitting.is_to_profile(callback), expected)

    @holds("TensorBoard.__init__", "_global_train_batch", "_global_test_batch")
    def test_tensorboard_counts_its_steps(self):
        callback = keras.callbacks.TensorBoard(self.get_temp_dir())
        self.assertEqual(
            [getattr(callback, n) for n in fitting.TENSORBOARD_STEPS], [0] * 2
        )
        callback.on_train_batch_begin(0)
        callback.on_test_batch_begin(0)
        self.assertEqual(
            [getattr(callback, n) for n in fitting.TENSORBOARD_STEPS],
            [1, 1],
        )


if __name__ == "__main__":
    tf.test.main()
