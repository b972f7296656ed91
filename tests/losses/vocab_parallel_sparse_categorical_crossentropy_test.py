"""Cross-entropy of sharded logits: plain cross-entropy, and nothing whole."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tfscale._internals import symbols
from tfscale.collectives import rank_collectives

# No other dim of the models below has this size or a multiple of it.
VOCABULARY = 84
Loss = tfscale.losses.VocabParallelSparseCategoricalCrossentropy
OPTIONS = (
    dict(),
    dict(ignore_class=3),
    dict(ignore_class=-1),
    dict(label_smoothing=0.1),
    dict(ignore_class=3, label_smoothing=0.3),
    dict(label_smoothing=1.0, reduction="sum"),
    dict(ignore_class=3, reduction=None),
    dict(ignore_class=3, reduction="mean_with_sample_weight"),
)


def logits_and_labels(ignored=None):
    random = np.random.RandomState(0)
    # Large ones, whose exp overflows, on one rank only.
    logits = random.randn(4, 5, VOCABULARY).astype("float32")
    logits[0, :, -3:] += 120
    logits[1] -= 120
    labels = random.randint(0, VOCABULARY, (4, 5))
    labels[:, 1] = 3 if ignored is None else ignored
    return logits, labels


def of_keras(labels, logits, ignore_class, label_smoothing, **kwargs):
    """The same in Keras' words: dense labels, and a mask for ignored ones."""
    loss = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=label_smoothing, **kwargs
    )
    one_hot = keras.ops.one_hot(labels, VOCABULARY)
    if ignore_class is not None:
        logits = tf.identity(logits)
        symbols.set_keras_mask(logits, tf.not_equal(labels, ignore_class))
    return loss(one_hot, logits)


def on_ranks(num_ranks, loss, labels, logits):
    """Loss of each rank, and its gradient, which is that rank's part."""
    mesh = tfscale.device_mesh(model=num_ranks)
    layout_map = keras.distribution.LayoutMap(mesh)
    strategy = tfscale.MeshStrategy(mesh, layout_map)

    @tf.function(autograph=False)
    def run():
        def replica():
            part = rank_collectives.local_shard(tf.constant(logits), 2)
            with tf.GradientTape() as tape:
                tape.watch(part)
                whole = rank_collectives.gather_from_ranks(part, 2)
                value = loss(labels, whole)
                total = 3.0 * tf.reduce_sum(value)
            slopes = tape.gradient(total, part)
            # What the first rank has is what comes back.
            return (
                rank_collectives.concat_over_ranks(value[tf.newaxis], 0),
                rank_collectives.concat_over_ranks(slopes, 2),
            )

        return strategy.run(replica)

    return run()


class NumbersTest(tf.test.TestCase, parameterized.TestCase):
    def assert_close(self, actual, expected):
        expected = np.asarray(expected)
        size = np.abs(expected).max()
        self.assertAllClose(actual, expected, rtol=0, atol=1e-5 * size)

    @parameterized.product(options=OPTIONS, num_ranks=(1, 2, 3, 4))
    @pytest.mark.crossing(every=16)
    def test_of_cross_entropy(self, options, num_ranks):
        options = {"ignore_class": None, "label_smoothing": 0.0, **options}
        logits, labels = logits_and_labels(options["ignore_class"])
        with tf.GradientTape() as tape:
            whole = tf.constant(logits)
            tape.watch(whole)
            expected = of_keras(labels, whole, **options)
            total = 3.0 * tf.reduce_sum(expected)
        values, slopes = on_ranks(num_ranks, Loss(**options), labels, logits)
        self.assertLen(values, num_ranks)
        for value in values:
            self.assert_close(value, expected)
        self.assert_close(slopes, tape.gradient(total, whole))

    @parameterized.parameters(1, 3)
    def test_tokens_that_are_ruled_out(self, num_ranks):
        # The first logit of another rank's part was multiplied by 0.
        logits, labels = logits_and_labels()
        logits[..., ::28] = -np.inf
        labels[labels % 28 == 0] = 3
        plain = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        values, slopes = on_ranks(num_ranks, Loss(), labels, logits)
        self.assertTrue(np.isfinite(slopes).all())
        for value in values:
            self.assert_close(value, plain(labels, logits))

    @parameterized.parameters(2, 3)
    @pytest.mark.crossing(every=2)
    def test_of_the_gradient_of_its_gradient(self, num_ranks):
        # The part of the other ranks' logits was missing.
        logits, labels = logits_and_labels()
        logits = np.clip(logits, -3, 3)

        def slopes_of_penalty(loss, part, gather, total):
            with tf.GradientTape() as outer:
                outer.watch(part)
                with tf.GradientTape() as tape:
                    tape.watch(part)
                    value = loss(labels, gather(part))
                slopes = tape.gradient(value, part)
                penalty = total(tf.reduce_sum(slopes**3))
            return outer.gradient(penalty, part)

        plain = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        expected = slopes_of_penalty(
            plain, tf.constant(logits), tf.identity, tf.identity
        )
        mesh = tfscale.device_mesh(model=num_ranks)
        layout_map = keras.distribution.LayoutMap(mesh)
        strategy = tfscale.MeshStrategy(mesh, layout_map)

        @tf.function(autograph=False)
        def run():
            def replica():
                slopes = slopes_of_penalty(
                    Loss(),
                    rank_collectives.local_shard(tf.constant(logits), 2),
                    lambda part: rank_collectives.gather_from_ranks(part, 2),
                    rank_collectives.reduce_from_ranks,
                )
                return rank_collectives.concat_over_ranks(slopes, 2)

            return strategy.run(replica)

        self.assert_close(run(), expected)

    @parameterized.parameters(None, 3, -1)
    def test_of_sparse_cross_entropy(self, ignored):
        logits, labels = logits_and_labels(ignored)
        weights = np.arange(20, dtype="float32").reshape(4, 5)
        plain = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=ignored
        )
        loss = Loss(ignore_class=ignored)
        if ignored is None:
            labels[labels == 3] = 4
        for y in (labels, labels[..., np.newaxis]):
            for kwargs in ({}, {"sample_weight": weights}):
                self.assert_close(
                    loss(y, logits, **kwargs), plain(y, logits, **kwargs)
                )

    @parameterized.parameters(1, 3)
    def test_a_label_outside_of_the_vocabulary_is_nan(self, num_ranks):
        logits, labels = logits_and_labels()
        labels[2, 2], labels[3, 3] = -1, VOCABULARY
        loss = Loss(reduction=None)
        values, _ = on_ranks(num_ranks, loss, labels, logits)
        expected = np.zeros((4, 5), bool)
        expected[2, 2] = expected[3, 3] = True
        for value in values:
            self.assertAllEqual(np.isnan(value), expected)

    def test_its_configuration_makes_it_anew(self):
        loss = Loss(
            ignore_class=3, label_smoothing=0.1, reduction="sum", name="x"
        )
        config = keras.saving.serialize_keras_object(loss)
        again = keras.saving.deserialize_keras_object(config)
        self.assertIsInstance(again, Loss)
        self.assertEqual(again.get_config(), loss.get_config())
        logits, labels = logits_and_labels()
        self.assertAllEqual(again(labels, logits), loss(labels, logits))

    @parameterized.parameters(-0.1, 1.5)
    def test_smoothing_outside_of_zero_to_one(self, smoothing):
        with self.assertRaisesRegex(ValueError, f"label_smoothing={smoothing}"):
            Loss(label_smoothing=smoothing)


def inferred():
    """An unmodified model with a dense head."""
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 6, name="tokens")(inputs)
    x = keras.layers.Dense(VOCABULARY, name="head")(x)
    return keras.Model(inputs, x)


def capped():
    """An unmodified model with a reverse embedding, its logits cast."""
    inputs = keras.Input((5,), dtype="int32")
    embedding = keras.layers.ReversibleEmbedding(
        VOCABULARY, 6, logit_soft_cap=5.0, name="tokens"
    )
    x = embedding(embedding(inputs), reverse=True)
    x = keras.layers.Activation("linear", dtype="float32")(x)
    return keras.Model(inputs, x)


def explicit():
    """A model written for it."""
    inputs = keras.Input((5,), dtype="int32")
    x = tfscale.layers.VocabParallelEmbedding(VOCABULARY, 6)(inputs)
    x = tfscale.layers.ColumnParallelDense(VOCABULARY, gather_output=True)(x)
    return keras.Model(inputs, x)


LAYOUTS = {
    inferred: {
        "tokens/embeddings": ("model", None),
        "head/kernel": (None, "model"),
        "head/bias": ("model",),
    },
    capped: {"tokens/embeddings": ("model", None)},
    explicit: {},
}


def reachable(graph):
    """The operations that TensorFlow does not leave out of a function."""
    found = set()
    left = [tensor.op for tensor in graph.outputs] + graph.control_outputs
    while left:
        op = left.pop()
        if op not in found:
            found.add(op)
            left += [tensor.op for tensor in op.inputs] + op.control_inputs
    return found


class NothingWholeTest(tf.test.TestCase, parameterized.TestCase):
    def shapes_of_a_step(self, build, loss, **kwargs):
        mesh = tfscale.device_mesh(data=2, model=2)
        layout_map = keras.distribution.LayoutMap(mesh)
        for pattern, layout in LAYOUTS[build].items():
            layout_map[pattern] = layout
        strategy = tfscale.MeshStrategy(mesh, layout_map)
        with strategy.scope():
            model = build()
            model.compile("sgd", loss, **kwargs)
            model.optimizer.build(model.trainable_variables)
        tokens = tf.constant(
            np.random.RandomState(0).randint(0, VOCABULARY, (16, 5))
        )

        @tf.function(autograph=False)  # as in `fit`
        def step(x):
            return strategy.run(model.train_step, ((x, x),))

        graph = step.get_concrete_function(tokens).graph
        return [
            tuple(tensor.shape.as_list())
            for op in reachable(graph)
            for tensor in op.outputs
            if tensor.shape.rank is not None
        ]

    @parameterized.product(
        build=[inferred, capped, explicit],
        policy=["float32", "mixed_bfloat16"],
    )
    @pytest.mark.crossing(every=6)
    def test_no_device_has_all_logits_in_a_training_step(self, build, policy):
        keras.config.set_dtype_policy(policy)
        shapes = self.shapes_of_a_step(build, Loss(label_smoothing=0.1))
        self.assertTrue([s for s in shapes if VOCABULARY // 2 in s])
        self.assertFalse([s for s in shapes if VOCABULARY in s])

    @parameterized.parameters(
        (lambda: Loss(), ["accuracy"]),
        (lambda: keras.losses.SparseCategoricalCrossentropy(True), []),
    )
    @pytest.mark.crossing(every=2)
    def test_what_needs_all_logits_gets_them(self, loss, metrics):
        # That the test above would see them.
        shapes = self.shapes_of_a_step(explicit, loss(), metrics=metrics)
        self.assertTrue([s for s in shapes if VOCABULARY in s])


if __name__ == "__main__":
    tf.test.main()
