"""Cross-entropy of sharded logits in a pipeline whose stages are sharded."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.losses import (
    vocab_parallel_sparse_categorical_crossentropy_test as loss_test,
)

VOCABULARY = loss_test.VOCABULARY
RANDOM = np.random.RandomState(0)
TOKENS = RANDOM.randint(0, VOCABULARY, (42, 6))
# Many ignored ones, more in some microbatches than in others.
LABELS = np.where(RANDOM.rand(42, 5) < np.linspace(0, 0.9, 42)[:, None], 3, 0)
LABELS = np.where(LABELS == 3, 3, TOKENS[:, 1:])
LAYOUTS = {
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
    "tokens/embeddings": ("model", None),
    "head/kernel": (None, "model"),
    "head/bias": ("model",),
}
OPTIONS = {
    "smooth": {"ignore_class": 3, "label_smoothing": 0.1},
    "plain": {},
    "ignored": {"ignore_class": 3},
    "by_tokens": {"ignore_class": 3, "reduction": "mean_with_sample_weight"},
}


def build():
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 6, name="tokens")(inputs)
    y = keras.layers.Dense(10, activation="relu", name="up")(x)
    x = x + keras.layers.Dense(6, name="down")(y)
    x = keras.layers.Dense(VOCABULARY, name="head")(x)
    return keras.Model(inputs, x, name="language_model")


def job(name, metrics=()):
    return same_numbers.Job(
        build,
        # The last batch has ten rows, which microbatches divide unevenly.
        dict(x=TOKENS[:, :-1], y=LABELS, batch_size=16),
        optimizer=lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
        loss=lambda: loss_test.Loss(**OPTIONS[name]),
        compile=lambda: dict(metrics=list(metrics)),
    )


def on_mesh(name, data, metrics=(), **options):
    return same_numbers.on_mesh(
        job(name, metrics), 2, 4, data, 2, LAYOUTS, **options
    )


@functools.cache
def trained(name, data):
    return on_mesh(name, data)


class SameNumbersTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(("smooth", 1), *((name, 2) for name in OPTIONS))
    @pytest.mark.crossing(every=5)
    def test_of_one_device(self, name, data):
        same_numbers.assert_same(
            self, same_numbers.on_one_device(job(name)), trained(name, data)
        )

    @pytest.mark.crossing
    def test_of_one_device_with_metrics_of_whole_logits(self):
        outcome = on_mesh("smooth", 1, ["accuracy"], recompute=True)
        same_numbers.assert_same(
            self,
            same_numbers.on_one_device(job("smooth", ["accuracy"])),
            outcome,
        )
        x = TOKENS[:, :-1]
        model = outcome.model
        logits = model.predict(x, batch_size=14, verbose=0)
        self.assertEqual(logits.shape, (42, 5, VOCABULARY))
        found = model.evaluate(x, LABELS, batch_size=14, verbose=0)
        same_numbers.assert_close(
            found[1], np.mean(logits.argmax(-1) == LABELS), "accuracy"
        )


def shapes_in(function, seen):
    """Shapes of all tensors that a function computes, and those it calls."""
    if function.name in seen:
        return
    seen.add(function.name)
    graph = function.graph
    for op in loss_test.reachable(graph):
        for tensor in op.outputs:
            if tensor.shape.rank is not None:
                yield tuple(tensor.shape.as_list())
        for value in op.node_def.attr.values():
            name = value.func.name
            if name:
                yield from shapes_in(graph._get_function(name), seen)


class NothingWholeTest(tf.test.TestCase, parameterized.TestCase):
    def shapes_of_a_step(self, model, step):
        strategy = model.distribute_strategy
        batch = tf.constant(TOKENS[:16, :-1]), tf.constant(LABELS[:16])
        run = tf.function(
            lambda x, y: strategy.run(step, args=((x, y),)),
            autograph=False,  # as in `fit`
        )
        return list(shapes_in(run.get_concrete_function(*batch), set()))

    @parameterized.parameters("train_step", "test_step")
    @pytest.mark.crossing(every=2)
    def test_no_device_has_all_logits(self, step):
        model = trained("smooth", 1).model
        shapes = self.shapes_of_a_step(model, getattr(model, step))
        # Of a microbatch, in the functions of the last stage.
        self.assertIn((4, 5, VOCABULARY // 2), shapes)
        self.assertFalse([s for s in shapes if VOCABULARY in s])

    @parameterized.parameters(
        (lambda: loss_test.Loss(), ["accuracy"]),
        (
            lambda: keras.losses.SparseCategoricalCrossentropy(
                from_logits=True
            ),
            [],
        ),
    )
    @pytest.mark.crossing
    def test_what_needs_all_logits_gets_them(self, loss, metrics):
        # That the test above would see them.
        mesh = tfscale.device_mesh(pipeline=2, model=2)
        with tfscale.MeshStrategy(mesh, LAYOUTS).scope():
            model = tfscale.PipelineModel(build(), 4, balance="params")
            model.compile("sgd", loss(), metrics=metrics)
        model.fit(TOKENS[:16, :-1], LABELS[:16], batch_size=16, verbose=0)
        shapes = self.shapes_of_a_step(model, model.train_step)
        self.assertTrue([s for s in shapes if VOCABULARY in s])


if __name__ == "__main__":
    tf.test.main()
