import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest

from examples import gpt
from tfscale import data


def _small_gpt(dropout=0.1, packed=False):
    return gpt.build_gpt(
        num_blocks=2,
        width=8,
        num_heads=2,
        sequence_length=6,
        dropout=dropout,
        packed=packed,
    )


class GptTest(tf.test.TestCase):
    def test_a_logit_depends_on_no_later_token(self):
        model = _small_gpt()
        tokens = np.array([[1, 2, 3, 4, 5, 6]], "int32")
        changed = np.array([[1, 2, 3, 9, 9, 9]], "int32")
        before = model.predict_on_batch(tokens)
        after = model.predict_on_batch(changed)
        self.assertEqual(before.shape, (1, 6, gpt.VOCABULARY))
        self.assertAllEqual(before[:, :3], after[:, :3])
        self.assertNotAllClose(before[:, 3:], after[:, 3:])

    def test_order_matters(self):
        # Without positions, attention is a sum over a set.
        model = _small_gpt()
        one = model.predict_on_batch(np.array([[1, 2, 3, 0, 0, 0]], "int32"))
        other = model.predict_on_batch(np.array([[2, 1, 3, 0, 0, 0]], "int32"))
        self.assertNotAllClose(one[:, 2], other[:, 2])

    def test_a_saved_model_is_the_same_model(self):
        model = _small_gpt()
        path = os.path.join(self.create_tempdir().full_path, "gpt.keras")
        model.save(path)
        loaded = keras.models.load_model(path)
        tokens = np.arange(12, dtype="int32").reshape(2, 6)
        self.assertAllEqual(
            loaded.predict_on_batch(tokens), model.predict_on_batch(tokens)
        )

    def test_a_sample_continues_the_prompt_and_repeats_with_its_seed(self):
        model = _small_gpt()
        # Every byte but the letters a to c is made impossible, so that the
        # continuation has one character per byte.
        bias = np.full(gpt.VOCABULARY, -1e9, "float32")
        bias[list(b"abc")] = 0.0
        model.get_layer("logits").bias.assign(bias)
        texts = [gpt.sample(model, "xyz", 20, 1.0, seed) for seed in (1, 1, 2)]
        for text in texts:
            self.assertRegex(text, "^xyz[abc]{20}$")
        self.assertEqual(texts[0], texts[1])
        self.assertNotEqual(texts[0], texts[2])

    @pytest.mark.crossing
    def test_packed_documents_are_learned_as_one_by_one(self):
        random = np.random.default_rng(0)
        documents = [
            random.integers(1, gpt.VOCABULARY, size=size)
            for size in (3, 6, 2, 4, 5, 3, 4)
        ]
        source = data.pack(documents, 6)
        self.assertLess(source.num_records, len(documents))
        packed = _small_gpt(dropout=0.0, packed=True)
        alone = _small_gpt(dropout=0.0)
        alone.set_weights(packed.get_weights())
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
        packed.compile(keras.optimizers.SGD(1.0), loss)
        x, y, weight = source.gather(tf.range(source.num_records))
        packed_loss = packed.train_on_batch(x, y, weight)

        losses, num_tokens = 0.0, 0
        with tf.GradientTape() as tape:
            for document in documents:
                # Filled up to the model's length; nothing before it sees that.
                row = np.zeros((1, 6), "int32")
                row[0, : len(document) - 1] = document[:-1]
                logits = alone(row)[0, : len(document) - 1]
                losses += tf.reduce_sum(
                    keras.losses.sparse_categorical_crossentropy(
                        document[1:], logits, from_logits=True
                    )
                )
                num_tokens += len(document) - 1
            mean = losses / num_tokens
        self.assertAllClose(packed_loss, mean, rtol=1e-6)
        variables = [v.value for v in alone.trainable_variables]
        for one, gradient, other in zip(
            variables,
            tape.gradient(mean, variables),
            packed.trainable_variables,
            strict=True,
        ):
            expected = one - tf.convert_to_tensor(gradient)
            self.assertAllClose(other, expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.crossing
    def test_a_packed_model_samples_as_the_same_model_of_one_document(self):
        packed, alone = _small_gpt(packed=True), _small_gpt()
        alone.set_weights(packed.get_weights())
        self.assertEqual(
            gpt.sample(packed, "xyz", 2, 1.0, 1),
            gpt.sample(alone, "xyz", 2, 1.0, 1),
        )


if __name__ == "__main__":
    absltest.main()
