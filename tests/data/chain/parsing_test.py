"""Parsing by batches must not be visible, and says where it is not done."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale import data

_N = 21  # not a multiple of the batch size
_BATCH = 8


def _example(number):
    features = {
        "x": tf.train.Feature(
            float_list=tf.train.FloatList(value=np.arange(4) + number / 7)
        ),
        "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
        "raw": tf.train.Feature(
            bytes_list=tf.train.BytesList(value=[bytes([number] * 4)])
        ),
    }
    return tf.train.Example(
        features=tf.train.Features(feature=features)
    ).SerializeToString()


_NUMBERS = np.array([b"%d" % n for n in range(_N)])
_BYTES = np.array([bytes([n, n + 1, 255, 7]) for n in range(_N)], "S4")
_EXAMPLES = np.array([_example(n) for n in range(_N)], object)
_LINES = np.array([b"%d,%d,word" % (n, 2 * n) for n in range(_N)])
_FLOATS = np.random.default_rng(0).normal(size=(_N, 3, 2)).astype("float32")
_FIXED = {
    "x": tf.io.FixedLenFeature([4], tf.float32),
    "y": tf.io.FixedLenFeature([], tf.int64),
    "raw": tf.io.FixedLenFeature([], tf.string),
}


@functools.cache
def _table():
    with tf.init_scope():
        return tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(["1", "2", "3"], [7, 8, 9]), -1
        )


def _scaled(example, shape):
    picture = tf.io.decode_raw(example["raw"], tf.uint8)
    picture = tf.reshape(tf.cast(picture, tf.float32) / 255.0, shape)
    return {"picture": picture, "x": example["x"] * 3.0}, example["y"]


# Records, a function of one, and that of a batch where it is another.
FUNCTIONS = {
    "bytes": (_BYTES, lambda r: tf.io.decode_raw(r, tf.uint8)),
    "numbers": (_NUMBERS, lambda r: tf.strings.to_number(r, tf.int64)),
    "example": (
        _EXAMPLES,
        lambda r: tf.io.parse_single_example(r, _FIXED),
        lambda r: tf.io.parse_example(r, _FIXED),
    ),
    "bytes_in_an_example": (  # holds a quotient
        _EXAMPLES,
        lambda r: _scaled(tf.io.parse_single_example(r, _FIXED), [2, 2]),
        lambda r: _scaled(tf.io.parse_example(r, _FIXED), [-1, 2, 2]),
    ),
    "csv": (_LINES, lambda r: tuple(tf.io.decode_csv(r, [0.0, 0.0, ""]))),
    "lookup": (_NUMBERS, lambda r: _table().lookup(r)),
    "structure": (
        _FLOATS,
        lambda x: {"a": x, "b": (x / 2.0, tf.reshape(x, [6]))},
        lambda x: {"a": x, "b": (x / 2.0, tf.reshape(x, [-1, 6]))},
    ),
    "reversed": (_FLOATS, lambda x: x[::-1] / 3.0, lambda x: x[:, ::-1] / 3.0),
}


def _pipeline(rows, **kwargs):
    kwargs = {"batch_size": _BATCH, "cache": "none", **kwargs}
    return data.pipeline(data.arrays(rows), **kwargs)


def _flipped(x, seed):
    flip = tf.random.stateless_uniform([], seed) < 0.5
    return tf.where(flip, x[:, ::-1], x)


def _noisy(x, seed):
    more = tf.random.stateless_truncated_normal([2], seed + 1)
    return x / 3.0 + tf.random.stateless_normal([3, 1], seed) * more


AUGMENTATIONS = {
    "deterministic": lambda x, seed: {"x": x[::-1] * 2.0 - 1.0},
    "flipped": _flipped,
    "noisy": _noisy,
    "mean": lambda x, seed: x - tf.reduce_mean(x),
    "condition": lambda x, seed: tf.image.stateless_random_flip_left_right(
        x[..., None], seed
    ),
}


class ParsingTest(tf.test.TestCase, parameterized.TestCase):
    def _assert_same_bits(self, batches, others):
        for one, other in zip(batches, others, strict=True):
            parts = zip(tf.nest.flatten(one), tf.nest.flatten(other))
            for a, b in parts:
                self.assertAllEqual(
                    tf.io.serialize_tensor(a), tf.io.serialize_tensor(b)
                )

    @parameterized.product(name=list(AUGMENTATIONS), cache=("none", "memory"))
    @pytest.mark.crossing(every=10)
    def test_augmentation_is_of_single_records(self, name, cache):
        def parse(x):
            return x / 7.0

        kwargs = dict(parse=parse, augment=AUGMENTATIONS[name])
        one_by_one = _pipeline(_FLOATS, **kwargs)
        found = _pipeline(_FLOATS, cache=cache, parse_batch=parse, **kwargs)
        self.assertFalse(one_by_one.recipe.batchwise)
        self.assertTrue(found.recipe.batchwise)
        self.assertEqual(one_by_one.element_spec, found.element_spec)
        self.assertEqual(int(found.cardinality()), 3)
        # With a cache, the last epoch's records are in it.
        for epoch, index in ((0, 0), (2, 5), (0, 0)):
            for pipeline in (one_by_one, found):
                pipeline.position.assign(epoch=epoch, index=index)
            self._assert_same_bits(one_by_one, found)

    @parameterized.product(
        name=list(FUNCTIONS), cache=("none", "memory", "file")
    )
    @pytest.mark.crossing(every=12)
    def test_values_are_those_of_single_records(self, name, cache):
        rows, parse, *parse_batch = FUNCTIONS[name]
        one_by_one = _pipeline(rows, parse=parse)
        found = _pipeline(
            rows,
            parse=parse,
            parse_batch=(*parse_batch, parse)[0],
            cache=cache,
            cache_dir=self.create_tempdir().full_path,
        )
        self.assertTrue(found.recipe.batchwise)
        self.assertEqual(one_by_one.element_spec, found.element_spec)
        for _ in range(2):  # the second epoch is of the cache
            self._assert_same_bits(one_by_one, found)

    def test_parse_batch_alone(self):
        pipeline = _pipeline(
            _EXAMPLES,
            shuffle=False,
            parse_batch=lambda r: tf.io.parse_example(r, _FIXED),
        )
        y = [batch["y"] for batch in pipeline]
        self.assertAllEqual(tf.concat(y, 0), range(_N))

    def test_parse_batch_must_be_parse_of_each(self):
        for parse_batch in (
            lambda x: x - tf.reduce_max(x),  # of all records
            lambda x: tf.cast(x, tf.float64),
            lambda x: x[:1],
        ):
            with self.assertRaisesRegex(ValueError, "bit for bit"):
                _pipeline(
                    _FLOATS, parse=lambda x: x + 0, parse_batch=parse_batch
                )

    def test_parse_batch_of_files_read_one_by_one(self):
        path = self.create_tempfile().full_path
        with self.assertRaisesRegex(
            ValueError, "`parse_batch`.*Received: files"
        ):
            data.pipeline(
                data.files(path), batch_size=1, parse_batch=lambda c, p: c
            )

    def test_explain_says_which_and_why(self):
        pipeline = _pipeline(_FLOATS, parse=lambda x: x * 2)
        text = str(data.explain(pipeline, seconds=0.05))
        self.assertIn("parsed one by one: `parse_batch`", text)


if __name__ == "__main__":
    absltest.main()
