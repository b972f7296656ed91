"""Packing: every token once, none sees another document."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest

from tfscale import data

_LENGTH = 16


def _documents():
    random = np.random.default_rng(0)
    return [
        random.integers(1, 99, size=size)
        for size in random.integers(1, 3 * _LENGTH, size=60)
    ]


class PackTest(tf.test.TestCase):
    def _segments(self, source):
        """(tokens and the last target, positions) of each segment."""
        found = []
        for x, y, weight in data.pipeline(source, batch_size=4, cache="none"):
            x = {name: part.numpy() for name, part in x.items()}
            self.assertAllEqual(weight > 0, x["segment_ids"] > 0)
            for row in range(len(y)):
                ids = x["segment_ids"][row]
                self.assertAllEqual(ids[ids > 0], np.sort(ids[ids > 0]))
                for segment in range(1, ids.max() + 1):
                    own = ids == segment
                    tokens = x["tokens"][row][own]
                    targets = y[row].numpy()[own]
                    self.assertAllEqual(tokens[1:], targets[:-1])
                    self.assertAllEqual(
                        x["positions"][row][own], range(len(tokens))
                    )
                    found.append((*tokens.tolist(), int(targets[-1])))
        return found

    def test_every_document_is_there_once_and_whole(self):
        documents = _documents()
        source = data.pack(documents, _LENGTH)
        pieces = [
            tuple(document[at : at + _LENGTH + 1].tolist())
            for document in documents
            for at in range(0, len(document) - 1, _LENGTH)
        ]
        self.assertCountEqual(self._segments(source), pieces)
        self.assertEqual(
            source.num_documents, sum(len(d) > 1 for d in documents)
        )

    def test_utilization_is_the_share_of_positions_with_a_token(self):
        documents = _documents()
        source = data.pack(documents, _LENGTH)
        tokens = sum(max(len(document) - 1, 0) for document in documents)
        positions = source.num_records * _LENGTH
        self.assertAlmostEqual(source.utilization, tokens / positions)
        self.assertGreater(source.utilization, 0.9)
        # One open sequence at a time wastes more.
        self.assertLess(
            data.pack(documents, _LENGTH, num_open=1).utilization,
            source.utilization,
        )

    def test_resume_at_every_batch(self):
        pipeline = data.pipeline(
            data.pack(_documents(), _LENGTH), batch_size=8, cache="none"
        )
        whole = [batch[1] for batch in pipeline]
        for stop in range(len(whole)):
            pipeline.position.assign(epoch=0, index=8 * stop)
            rest = [batch[1] for batch in pipeline]
            self.assertLen(rest, len(whole) - stop)
            for one, other in zip(whole[stop:], rest, strict=True):
                self.assertAllEqual(one, other)

    def test_no_attention_across_documents(self):
        # Another first document changes nothing in the second one's outputs.
        tokens = keras.Input((8,), dtype="int32")
        segments = keras.Input((8,), dtype="int32")
        x = keras.layers.Embedding(99, 8)(tokens)
        y = keras.layers.MultiHeadAttention(2, 4)(
            x,
            x,
            attention_mask=data.packed_attention_mask(segments),
            use_causal_mask=True,
        )
        model = keras.Model([tokens, segments], y)
        outputs = []
        for first in ([1, 2, 3, 4], [9, 8, 7, 6]):
            source = data.pack([first, [11, 12, 13, 14, 15]], 8)
            x, *_ = source.read(tf.constant(0, tf.int64))
            row = [x["tokens"][None], x["segment_ids"][None]]
            outputs.append(model(row)[0].numpy())
        self.assertAllEqual(outputs[0][3:7], outputs[1][3:7])
        self.assertNotAllClose(outputs[0][:3], outputs[1][:3])
        self.assertFalse(np.isnan(outputs[0]).any())

    def test_gradients_are_those_of_the_documents_apart(self):
        keras.utils.set_random_seed(0)
        embedding = keras.layers.Embedding(99, 8)
        places = keras.layers.Embedding(_LENGTH, 8)
        attentions = [keras.layers.MultiHeadAttention(2, 4) for _ in range(2)]
        head = keras.layers.Dense(99)

        def loss(x, y, weight):
            h = embedding(x["tokens"]) + places(x["positions"])
            mask = data.packed_attention_mask(x["segment_ids"])
            for attention in attentions:
                h += attention(h, h, attention_mask=mask, use_causal_mask=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, head(h))
            return tf.reduce_sum(losses * weight)

        def gradients(source, rows):
            with tf.GradientTape() as tape:
                value = loss(*source.gather(tf.range(rows, dtype=tf.int64)))
            layers = [embedding, places, *attentions, head]
            weights = [w for layer in layers for w in layer.trainable_weights]
            found = tape.gradient(value, weights)
            return [value, *map(tf.convert_to_tensor, found)]

        documents = _documents()[:12]
        packed = data.pack(documents, _LENGTH)
        together = gradients(packed, packed.num_records)
        apart = [
            gradients(data.pack([document[at : at + _LENGTH + 1]], _LENGTH), 1)
            for document in documents
            for at in range(0, len(document) - 1, _LENGTH)
        ]
        self.assertLess(packed.num_records, len(apart))
        for one, *others in zip(together, *apart, strict=True):
            self.assertAllClose(one, sum(others), rtol=1e-5, atol=1e-5)

    def test_bad_input_is_named(self):
        with self.assertRaisesRegex(ValueError, "length=0"):
            data.pack([[1, 2]], 0)
        with self.assertRaisesRegex(ValueError, "rows of integers"):
            data.pack([[1]], 4)
        with self.assertRaisesRegex(ValueError, "document 1 of float64"):
            data.pack([[], [1.0, 2.0]], 4)
        for length in (4.5, "4"):
            with self.assertRaisesRegex(TypeError, f"length={length!r}"):
                data.pack([[1, 2]], length)
        # A batch of rows was one document, and 2 ** 31 a negative token.
        with self.assertRaisesRegex(ValueError, r"document 0 .*\(2, 2\)"):
            data.pack([[[1, 2], [3, 4]]], 4)
        with self.assertRaisesRegex(ValueError, "32 bits.*2147483648"):
            data.pack([[1, 2**31]], 4)


if __name__ == "__main__":
    absltest.main()
