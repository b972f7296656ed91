"""Batches of records of several lengths: padded, in order, resumed exactly."""

import json
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale import data

_COUNT = 23


def _row(number):
    return [number] * (number * 7 % 5)


def _padded(rows, value=0):
    longest = max(map(len, rows))
    return [row + [value] * (longest - len(row)) for row in rows]


class PaddingTest(tf.test.TestCase, parameterized.TestCase):
    def _lines(self):
        path = os.path.join(self.create_tempdir().full_path, "a.jsonl")
        with open(path, "w") as file:
            for n in range(_COUNT):
                line = {"ids": _row(n), "n": n, "words": ["w"] * (n % 3)}
                file.write(json.dumps(line) + "\n")
        return data.json_lines(path)

    def _ragged(self):
        rows = tf.ragged.constant([_row(n) for n in range(_COUNT)], tf.int64)
        records = tf.data.Dataset.from_tensor_slices(
            {"ids": rows, "n": tf.range(_COUNT, dtype=tf.int64)}
        ).map(lambda row: {"ids": row["ids"] + 0, "n": row["n"]})
        return data.dataset(records)

    @parameterized.product(
        kind=("lines", "ragged"), shuffle=(False, True), start=(0, 8)
    )
    @pytest.mark.crossing(every=8)
    def test_a_batch_is_as_long_as_its_longest(self, kind, shuffle, start):
        source = getattr(self, f"_{kind}")()
        kwargs = {"batch_size": 4, "shuffle": shuffle}
        plain = data.pipeline(source, parse=lambda row: row["n"], **kwargs)
        order = [b.tolist() for b in plain.as_numpy_iterator()]
        pipeline = data.pipeline(source, padding=0, **kwargs)
        self.assertLen(pipeline, len(order))
        pipeline.position.assign(index=start)
        batches = list(pipeline.as_numpy_iterator())
        self.assertLen(batches, len(order) - start // 4)
        for numbers, batch in zip(order[start // 4 :], batches, strict=True):
            self.assertEqual(batch["n"].tolist(), numbers)
            wanted = _padded([_row(n) for n in numbers])
            self.assertEqual(batch["ids"].tolist(), wanted)

    def test_each_part_has_a_value_of_its_own(self):
        pipeline = data.pipeline(
            self._lines(),
            batch_size=3,
            shuffle=False,
            padding={"ids": -1, "n": 0, "words": "none"},
        )
        first = next(iter(pipeline))
        wanted = _padded([_row(n) for n in range(3)], -1)
        self.assertAllEqual(first["ids"], wanted)
        self.assertAllEqual(
            first["words"],
            [[b"none"] * 2, [b"w", b"none"], [b"w", b"w"]],
        )

    def test_what_augment_makes_longer_and_the_weights_of_a_last_batch(self):
        pipeline = data.pipeline(
            self._lines(),
            parse=lambda row: (row["ids"], row["n"]),
            augment=lambda x, y, seed: (tf.concat([x, [99]], 0), y),
            batch_size=4,
            shuffle=False,
            remainder="pad",
            padding=0,
        )
        *_, (x, y, weight) = pipeline.as_numpy_iterator()
        self.assertEqual(weight.tolist(), [1, 1, 1, 0])
        rows = [[*_row(n), 99] for n in y.tolist()]
        self.assertEqual(x.tolist(), _padded(rows))

    @pytest.mark.crossing
    def test_caches(self):
        folder = self.create_tempdir().full_path
        kwargs = {"batch_size": 4, "padding": 0, "seed": 3}
        source = self._lines()
        plain = data.pipeline(source, **kwargs)
        self.assertEqual(plain.recipe.cache_kind, "none")
        cached = data.pipeline(source, cache="file", cache_dir=folder, **kwargs)
        for one, other in zip(plain, cached, strict=True):
            for name in one:
                self.assertAllEqual(one[name], other[name])
        with self.assertRaisesRegex(ValueError, "cache='memory', `padding`"):
            data.pipeline(source, cache="memory", **kwargs)

    def test_a_model_trains_on_them(self):
        pipeline = data.pipeline(
            self._lines(),
            # The mean of no token at all would be no number.
            parse=lambda row: (
                tf.concat([[1], row["ids"]], 0),
                tf.cast(row["n"], tf.float32),
            ),
            batch_size=4,
            padding=0,
        )
        model = keras.Sequential(
            [
                keras.layers.Embedding(_COUNT, 2, mask_zero=True),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
        history = model.fit(pipeline, epochs=2, verbose=0).history
        self.assertTrue(np.isfinite(history["loss"]).all())

    @parameterized.parameters(
        ({"padding": {"ids": 0}}, "have the structure of a record"),
        ({"padding": 0.5}, "0.5 for int64"),
        ({"padding": 0, "parse_batch": lambda b: b}, "`parse_batch`"),
    )
    def test_as_nothing_can_be_padded(self, kwargs, error):
        with self.assertRaisesRegex(ValueError, error):
            data.pipeline(self._lines(), batch_size=4, **kwargs)

    @parameterized.parameters(-100, 256)
    def test_a_value_that_the_dtype_does_not_hold_is_no_other_one(self, value):
        # Labels of 8 bits were padded with 156 for -100.
        rows = tf.data.Dataset.range(1, 4).map(
            lambda size: tf.ones([size], tf.uint8)
        )
        with self.assertRaisesRegex(ValueError, f"{value} for uint8"):
            data.pipeline(data.dataset(rows), batch_size=3, padding=value)

    def test_without_it_the_error_names_it(self):
        pipeline = data.pipeline(self._lines(), batch_size=4, shuffle=False)
        with self.assertRaisesRegex(tf.errors.OpError, "use `padding`"):
            list(pipeline)


if __name__ == "__main__":
    absltest.main()
