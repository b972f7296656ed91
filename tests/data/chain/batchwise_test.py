"""Parsing by batches must not be visible, and says where it is not done."""

import functools
import re
import warnings
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale import data
from tfscale.data.chain import parsing

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
        "many": tf.train.Feature(
            int64_list=tf.train.Int64List(value=range(number % 3))
        ),
        "shape": tf.train.Feature(int64_list=tf.train.Int64List(value=[2, 2])),
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


def _parsed(record):
    return tf.io.parse_single_example(record, _FIXED)


def _of_its_shape(record):
    shape = {"shape": tf.io.FixedLenFeature([2], tf.int64)}
    example = tf.io.parse_single_example(record, {**_FIXED, **shape})
    return tf.reshape(example["x"], example["shape"])


def _scaled(record):
    example = _parsed(record)
    picture = tf.io.decode_raw(example["raw"], tf.uint8)
    picture = tf.reshape(tf.cast(picture, tf.float32) / 255.0, [2, 2])
    return {"picture": picture, "x": example["x"] * 3.0}, example["y"]


def _loop(record):
    total = tf.constant(0)
    for _ in tf.range(3):
        total += tf.strings.to_number(record, tf.int32)
    return total


def _many(record):
    many = {"many": tf.io.VarLenFeature(tf.int64)}
    sparse = tf.io.parse_single_example(record, many)["many"]
    return tf.sparse.to_dense(tf.sparse.reset_shape(sparse, [3]))


def _sequence(record):
    many = {
        "many": tf.io.FixedLenSequenceFeature(
            [], tf.int64, allow_missing=True, default_value=5
        )
    }
    row = tf.io.parse_single_example(record, many)["many"]
    # In a batch, shorter ones are filled up with the default.
    return tf.reduce_sum(row)


def _ragged(record):
    words = tf.strings.split(record, ",")
    return tf.RaggedTensor.from_row_lengths(words, [3]).to_tensor()


def _python(record):
    number = tf.numpy_function(lambda r: np.int64(len(r)), [record], tf.int64)
    return tf.ensure_shape(number, [])


@functools.cache
def _state():
    with tf.init_scope():
        return tf.Variable(3)


def _stateful(record):
    return tf.strings.to_number(record, tf.int32) + _state().read_value()


def _printed(record):
    tf.debugging.check_numerics(tf.strings.to_number(record), "never")
    tf.debugging.assert_less(tf.strings.to_number(record), 1e9)
    return record


# Records, function, and a part of why it is not run on batches, or None.
FUNCTIONS = {
    "bytes": (_BYTES, lambda r: tf.io.decode_raw(r, tf.uint8), None),
    "bytes_of_int16": (_BYTES, lambda r: tf.io.decode_raw(r, tf.int16), None),
    "padded_bytes": (
        _NUMBERS,
        lambda r: tf.io.decode_raw(r, tf.uint8, fixed_length=4),
        None,
    ),
    "numbers": (_NUMBERS, lambda r: tf.strings.to_number(r, tf.int64), None),
    "example": (_EXAMPLES, _parsed, None),
    "bytes_in_an_example": (_EXAMPLES, _scaled, None),
    "csv": (
        _LINES,
        lambda r: tuple(tf.io.decode_csv(r, [0.0, 0.0, ""])),
        None,
    ),
    "lookup": (_NUMBERS, lambda r: _table().lookup(r), None),
    "regex": (
        _LINES,
        lambda r: tf.strings.regex_replace(r, "[0-9]+,", "x"),
        None,
    ),
    "substring": (
        _LINES,
        lambda r: tf.strings.substr(r, tf.strings.length(r) - 4, 2),
        "Substr",
    ),
    "hash": (
        _LINES,
        lambda r: tf.strings.to_hash_bucket_fast(tf.strings.upper(r), 99),
        None,
    ),
    "stacked": (
        _LINES,
        lambda r: tf.stack(tf.io.decode_csv(r, [0.0, 0.0, ""])[:2]),
        "Pack",
    ),
    "comparison": (_NUMBERS, lambda r: tf.equal(r, "7"), None),
    "scaled": (_FLOATS, lambda x: x / 255.0 - 0.5, None),
    "reversed": (_FLOATS, lambda x: x[::-1] / 3.0, "StridedSlice"),
    "sliced": (_FLOATS, lambda x: (x[1:, ::-1], x[0, 1]), "StridedSlice"),
    "transposed": (_FLOATS, lambda x: tf.transpose(x)[tf.newaxis], "Transpose"),
    "largest": (_FLOATS, lambda x: x / tf.reduce_max(tf.abs(x)), "Abs"),
    "one_hot": (
        _FLOATS,
        lambda x: tf.one_hot(tf.argmax(x, axis=0), 3, dtype=tf.uint8),
        "ArgMax",
    ),
    "chosen": (
        _FLOATS,
        lambda x: tf.where(x > 0, x, tf.zeros_like(x)),
        "Greater",
    ),
    "joined": (_FLOATS, lambda x: tf.concat([x, x * 2], axis=1), "ConcatV2"),
    "gathered": (_FLOATS, lambda x: tf.gather(x, [2, 0]), "GatherV2"),
    "constant": (
        _FLOATS,
        lambda x: (x, tf.constant([1, 2])),
        "it uses Identity",
    ),
    "structure": (
        _FLOATS,
        lambda x: {"a": x, "b": (x / 2.0, tf.reshape(x, [6]))},
        None,
    ),
    # Of int64, as shapes of NumPy are: it was a TypeError of `tf.concat`.
    "shape_of_numpy": (
        _FLOATS,
        lambda x: tf.reshape(x, np.array([2, 3])),
        None,
    ),
    "shape_of_the_record": (_EXAMPLES, _of_its_shape, "shape of its own"),
    # Not the same bits in every batch, or not known to be.
    "sum": (_FLOATS, lambda x: tf.reduce_sum(x), "Sum"),
    "mean": (_FLOATS, lambda x: x - tf.reduce_mean(x), "Mean"),
    "exponential": (_FLOATS, lambda x: tf.exp(x), "Exp"),
    "matrix_product": (
        _FLOATS,
        lambda x: tf.matmul(x, x, transpose_b=True),
        "MatMul",
    ),
    "random": (
        _FLOATS,
        lambda x: x + tf.random.stateless_uniform([2], [1, 2]),
        None,  # refused before, as what is random belongs into `augment`
    ),
    "branch": (
        _NUMBERS,
        lambda r: tf.cond(tf.equal(r, "1"), lambda: 1, lambda: 2),
        "it uses",
    ),
    "loop": (_NUMBERS, _loop, "it uses"),
    "variable_length": (_EXAMPLES, _many, "variable length"),
    "sequence": (_EXAMPLES, _sequence, "it uses"),
    "ragged": (_LINES, _ragged, "it uses"),
    "python": (_NUMBERS, _python, "PyFunc"),
    "assertion": (_NUMBERS, _printed, "it uses"),
    "stateful": (_NUMBERS, _stateful, "ReadVariableOp"),
    # Right for these; out of the range it goes by the place in a vector.
    "small_integer": (
        _FLOATS,
        lambda x: tf.cast(x * x, tf.uint8),
        "out of range",
    ),
    "integer": (
        _FLOATS,
        lambda x: tf.cast(x * 1e30, tf.int32),
        "out of range",
    ),
    "big_endian": (
        _BYTES,
        lambda r: tf.io.decode_raw(r, tf.int16, little_endian=False),
        None,
    ),
    "sums_of_integers": (
        _FLOATS,
        lambda x: tf.cumsum(tf.cast(x, tf.int64)) % 7,
        "out of range",
    ),
    "of_several_ranks": (
        _FLOATS,
        lambda x: x / tf.reshape(x, [6])[:2],
        "StridedSlice",
    ),
    "broadcast": (_FLOATS, lambda x: x * tf.constant([1.0, 2.0]), None),
    "of_another_rank": (
        _FLOATS,
        lambda x: x * tf.ones([1, 1, 1]),
        "several ranks",
    ),
    "sorted": (_FLOATS, lambda x: tf.sort(x, axis=0), "it uses"),
    "not_converted": (
        _FLOATS,
        lambda x: (tf.shape(x), tf.rank(x)),
        "it uses",
    ),
}
REFUSED = ("random",)


def _pipeline(rows, **kwargs):
    kwargs = {"batch_size": _BATCH, "cache": "none", **kwargs}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "python-function")
        return data.pipeline(data.arrays(rows), **kwargs)


def _flipped(x, seed):
    flip = tf.random.stateless_uniform([], seed) < 0.5
    return tf.where(flip, x[:, ::-1], x)


def _shifted(x, seed):
    begin = tf.random.stateless_uniform([], seed, 0, 3, tf.int32)
    return tf.gather(tf.pad(x, [[1, 1], [0, 0]]), begin + tf.range(3))


def _noisy(x, seed):
    more = tf.random.stateless_truncated_normal([2], seed + 1)
    return x / 3.0 + tf.random.stateless_normal([3, 1], seed) * more


AUGMENTATIONS = {
    "deterministic": lambda x, seed: {"x": x[::-1] * 2.0 - 1.0},
    "flipped": _flipped,
    "shifted": _shifted,
    "noisy": _noisy,
    "from_numbers": lambda x, seed: x + tf.random.stateless_uniform([], [7, 7]),
    "softmax": lambda x, seed: tf.nn.softmax(x),
    "mean": lambda x, seed: x - tf.reduce_mean(x),
    "python": lambda x, seed: tf.ensure_shape(
        tf.numpy_function(np.negative, [x], tf.float32), [3, 2]
    ),
    "condition": lambda x, seed: tf.image.stateless_random_flip_left_right(
        x[..., None], seed
    ),
    "begins_where_drawn": lambda x, seed: x[
        tf.random.stateless_uniform([], seed, 0, 3, "int32")
    ],
}


class AugmentTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(name=list(AUGMENTATIONS), cache=("none", "memory"))
    @pytest.mark.crossing(every=16)
    def test_values_and_draws_are_those_of_single_records(self, name, cache):
        kwargs = dict(parse=lambda x: x / 7.0, augment=AUGMENTATIONS[name])
        one_by_one = _pipeline(_FLOATS, **kwargs)
        with mock.patch.object(parsing, "FEW_RECORDS", 0):
            found = _pipeline(_FLOATS, cache=cache, **kwargs)
        self.assertFalse(one_by_one.recipe.batchwise)
        self.assertTrue(found.recipe.batchwise)
        self.assertEqual(one_by_one.element_spec, found.element_spec)
        # With a cache, the last epoch's records are in it.
        for epoch, index in ((0, 0), (2, 5), (0, 0)):
            for pipeline in (one_by_one, found):
                pipeline.position.assign(epoch=epoch, index=index)
            for one, other in zip(one_by_one, found, strict=True):
                parts = zip(tf.nest.flatten(one), tf.nest.flatten(other))
                for a, b in parts:
                    self.assertAllEqual(
                        tf.io.serialize_tensor(a), tf.io.serialize_tensor(b)
                    )


class BatchwiseTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*(n for n in FUNCTIONS if n not in REFUSED))
    @pytest.mark.crossing(every=24)
    def test_values_are_those_of_single_records(self, name):
        rows, parse, why_not = FUNCTIONS[name]
        one_by_one = _pipeline(rows, parse=parse)
        self.assertIn("fewer", one_by_one.recipe.parse_reason)
        with mock.patch.object(parsing, "FEW_RECORDS", 0):
            found = _pipeline(rows, parse=parse)
        reason = found.recipe.parse_reason
        self.assertEqual(found.recipe.batchwise, why_not is None, reason)
        self.assertNotIn("\n", reason)
        if why_not is not None:
            self.assertIn(why_not, reason)
            return  # it is the same chain
        self.assertEqual(one_by_one.element_spec, found.element_spec)
        for one, other in zip(one_by_one, found, strict=True):
            parts = zip(tf.nest.flatten(one), tf.nest.flatten(other))
            for a, b in parts:
                self.assertAllEqual(
                    tf.io.serialize_tensor(a), tf.io.serialize_tensor(b)
                )

    @parameterized.parameters("memory", "file")
    def test_a_cache_keeps_what_single_records_are(self, cache):
        rows, parse, _ = FUNCTIONS["bytes_in_an_example"]  # holds a quotient
        kwargs = dict(parse=parse, cache_dir=self.create_tempdir().full_path)
        one_by_one = _pipeline(rows, **kwargs)
        with mock.patch.object(parsing, "FEW_RECORDS", 0):
            found = _pipeline(rows, cache=cache, **kwargs)
        self.assertTrue(found.recipe.batchwise)
        for _ in range(2):  # the second epoch is of the cache
            for one, other in zip(one_by_one, found, strict=True):
                parts = zip(tf.nest.flatten(one), tf.nest.flatten(other))
                for a, b in parts:
                    self.assertAllEqual(a, b)

    def test_what_is_random_is_refused_as_ever(self):
        rows, parse, _ = FUNCTIONS["random"]
        with self.assertRaisesRegex(ValueError, "deterministic"):
            _pipeline(rows, parse=parse)

    def test_augmentation_is_of_single_records(self):
        def augment(x, seed):
            return x + tf.random.stateless_uniform([2], seed)

        def scaled(x):
            return x * 2

        one_by_one = _pipeline(_FLOATS, parse=scaled, augment=augment)
        found = _pipeline(
            _FLOATS, parse=scaled, parse_batch=scaled, augment=augment
        )
        self.assertEqual(int(found.cardinality()), 3)
        for one, other in zip(one_by_one, found, strict=True):
            self.assertAllEqual(one, other)

    def test_a_record_of_another_length_is_named(self):
        rows = _BYTES.tolist()
        rows[12] = b"abc"
        with mock.patch.multiple(parsing, FEW_RECORDS=0, _TRIED=4):
            pipeline = _pipeline(
                np.array(rows),
                parse=lambda r: tf.io.decode_raw(r, tf.uint8),
                shuffle=False,
            )
        self.assertTrue(pipeline.recipe.batchwise)
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, re.escape("Record] [12]")
        ):
            list(pipeline)

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
        with self.assertRaisesRegex(ValueError, "a batch at a time"):
            data.pipeline(
                data.files(path), batch_size=1, parse_batch=lambda c, p: c
            )

    def test_explain_says_which_and_why(self):
        pipeline = _pipeline(_FLOATS, parse=lambda x: x * 2)
        text = str(data.explain(pipeline, seconds=0.05))
        self.assertIn("Records are parsed one by one: there are fewer", text)


if __name__ == "__main__":
    absltest.main()
