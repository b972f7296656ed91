import os

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest

from examples import gpt


def _small_gpt():
    return gpt.build_gpt(
        num_blocks=2, width=8, num_heads=2, sequence_length=6, dropout=0.1
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


if __name__ == "__main__":
    absltest.main()
