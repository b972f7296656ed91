"""What `fit` takes on one device it takes on replicas, and says the same of."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tfscale.step import microbatches

RANDOM = np.random.RandomState(0)
X = np.maximum(RANDOM.normal(size=(11, 4)), 0).astype("float32")
Y = RANDOM.normal(size=(11, 2)).astype("float32")
ROWS = tf.data.Dataset.from_tensor_slices


def build(num_microbatches=None, shape=(4,), **axes):
    same_numbers.reset()
    scope = contextlib.nullcontext()
    if axes:
        scope = tfscale.MeshStrategy(tfscale.device_mesh(**axes)).scope()
    with scope:
        x = h = keras.Input(shape)
        if shape == (None,):
            h = keras.layers.Embedding(5, 4)(h)
        if shape[0] is None:
            h = keras.layers.GlobalAveragePooling1D()(h)
        h = keras.layers.Dense(4, "tanh")(h)
        model = keras.Model(x, keras.layers.Dense(2)(h))
        if num_microbatches:
            model = tfscale.PipelineModel(model, num_microbatches)
        # Alone it runs by operations: some steps are not worth a trace.
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=not axes)
    return model


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        rows = slice(4 * i, 4 * i + 4)
        return X[rows], Y[rows]


class AnyDataTest(parameterized.TestCase):
    def assert_as_on_one_device(self, data, axes, shape=(4,), **kwargs):
        models = build(shape=shape), build(shape=shape, **axes)
        logs = [
            model.fit(data(), verbose=0, epochs=2, shuffle=False).history
            for model in models
        ]
        np.testing.assert_allclose(*(log["loss"] for log in logs), rtol=1e-5)
        return models

    @parameterized.parameters((2, 4), (4, 8), (4, 5), (3, 10))
    @pytest.mark.crossing(every=2)
    def test_sparse_batches(self, data, batch_size):
        # Keras asks for their mean, to see what they look like. A replica
        # without a row of the last batch ended in DeserializeSparse.
        self.assert_as_on_one_device(
            lambda: ROWS((tf.sparse.from_dense(X), Y)).batch(batch_size),
            dict(data=data),
        )

    @parameterized.parameters("generator", "dataset")
    @pytest.mark.crossing(every=2)
    def test_sparse_indices_in_any_order(self, kind):
        """As SciPy's arrays have them; replicas could not divide these."""

        def batches():
            for first in range(0, 11, 4):
                rows = slice(first, first + 4)
                x = tf.sparse.from_dense(X[rows])
                values = x.indices[::-1], x.values[::-1], x.dense_shape
                yield tf.SparseTensor(*values), Y[rows]

        def dataset():
            specs = tf.SparseTensorSpec((None, 4)), tf.TensorSpec((None, 2))
            return tf.data.Dataset.from_generator(
                batches, output_signature=specs
            )

        def fit(scope, eagerly=False):
            same_numbers.reset()
            with scope:
                x = keras.Input((4,), sparse=True)
                model = keras.Model(x, keras.layers.Dense(2)(x))
                model.compile("sgd", "mse", run_eagerly=eagerly)
            data = batches() if kind == "generator" else dataset()
            return model.fit(data, steps_per_epoch=3, verbose=0).history["loss"]

        strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=2))
        np.testing.assert_allclose(
            fit(strategy.scope()),
            fit(contextlib.nullcontext(), True),
            rtol=1e-5,
        )

    @parameterized.parameters(
        ("tokens", (None,), 2),
        ("rows of one length", (4,), 2),
        ("rows of one length", (4,), 3),
        ("steps", (None, 4), 2),
        ("steps", (None, 4), 3),
    )
    @pytest.mark.crossing(every=3)
    def test_ragged_batches(self, kind, shape, data):
        # On a replica without rows those of one length had none: "Matrix
        # size-incompatible", and steps had no features: "Tensor's shape (0,)".
        lengths = np.arange(11) % 3 + 1
        values = {
            "tokens": (np.arange(21) % 5, lengths),
            "rows of one length": (X.ravel(), [4] * 11),
            "steps": (RANDOM.normal(size=(21, 4)).astype("float32"), lengths),
        }
        x = tf.RaggedTensor.from_row_lengths(*values[kind])

        def batches():
            return ROWS((x, Y)).batch(5)

        models = self.assert_as_on_one_device(batches, dict(data=data), shape)
        same_numbers.assert_close(
            *(model.predict(batches(), verbose=0) for model in models)
        )

    @parameterized.product(data=(2, 1), is_dataset=(False, True))
    @pytest.mark.crossing(every=4)
    def test_weights_may_be_none(self, data, is_dataset):
        # "'_OptionalImpl' object has no attribute 'shape'" and the like.
        def batches():
            for first in [*range(0, 11, 4)] * 2:
                rows = slice(first, first + 4)
                yield X[rows], Y[rows], None

        def dataset():
            rows = ROWS((X, Y)).batch(4).repeat()
            return rows.map(lambda x, y: (x, y, None))

        logs = [
            model.fit(
                dataset() if is_dataset else batches(),
                steps_per_epoch=2,
                epochs=2,
                verbose=0,
            ).history["loss"]
            for model in (build(), build(data=data))
        ]
        np.testing.assert_allclose(*logs, rtol=1e-5)

    def test_predictions_of_fewer_rows_than_replicas(self):
        # Keras takes what is added for a bias if it has no rows.
        def residual():
            keras.utils.set_random_seed(1)
            x = keras.Input((4,))
            return keras.Model(x, x + keras.layers.Dense(4)(x))

        with tfscale.MeshStrategy(tfscale.device_mesh(data=2)).scope():
            model = residual()
        np.testing.assert_allclose(
            model.predict(X[:1], verbose=0),
            residual().predict(X[:1], verbose=0),
            rtol=1e-5,
        )

    def test_no_batch(self):
        # A bare StopIteration came out of `fit`, an UnboundLocalError of
        # `predict`.
        model = build(data=2)
        for data in (ROWS((X, Y)).batch(4).take(0), X[:0]):
            for method in (model.evaluate, model.predict):
                with self.assertRaisesRegex(
                    ValueError, "data without any.*filter"
                ):
                    method(data, verbose=0)

    @parameterized.parameters(
        tf.uint16, tf.uint32, tf.uint64, tf.int8, tf.bool, tf.bfloat16
    )
    @pytest.mark.crossing(every=6)
    def test_rows_of_any_type_that_microbatches_do_not_divide(self, dtype):
        # "Unimplemented: Tile" of the kinds of integers that few use.
        rows = tf.cast(RANDOM.randint(0, 2, (1, 4)), dtype)
        parts = microbatches.Microbatches({"x": rows}, 3).split()
        self.assertEqual([count.numpy() for count, _ in parts], [1, 0, 0])
        for _, part in parts:
            self.assertEqual(part["x"].dtype, dtype)
            np.testing.assert_array_equal(part["x"], rows)

    @parameterized.parameters(
        (dict(data=2),),
        (dict(data=1),),
        (dict(pipeline=2, num_microbatches=2),),
    )
    @pytest.mark.crossing
    def test_what_its_workers_have_made_is_trained_on(self, axes):
        # Keras looked at what it is like, and took batches away for that.
        self.assert_as_on_one_device(lambda: Batches(workers=2), axes)

    def test_each_batch_of_workers_is_trained_on_once_in_an_epoch(self):
        # Those made for Keras' look came first, and then all began again: more
        # than the workers' queue holds were never trained on.
        class Many(Batches):
            def __len__(self):
                return 30

            def __getitem__(self, i):
                x, y = super().__getitem__(i % 3)
                return x, y + np.float32(i / 30)

        self.assert_as_on_one_device(lambda: Many(workers=2), dict(data=2))


if __name__ == "__main__":
    tf.test.main()
