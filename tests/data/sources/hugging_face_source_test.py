"""Hugging Face datasets: values and bad input. The rest is in the contract."""

import datasets
import numpy as np
import PIL.Image
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale import data

# Each was once read as another value: float64 as float32, None as the smallest
# integer, bytes without the zeros at their end.
_COLUMNS = {
    "float64": ([1 / 3, 1e300, None], "float64", [1 / 3, 1e300, np.nan]),
    "int32": ([1, None, 3], "int32", [1, 0, 3]),
    "uint8": ([1, 255, 0], "uint8", [1, 255, 0]),
    "bool": ([True, None, False], "bool", [True, False, False]),
    "binary": ([b"a\0", b"\xff\0", None], "binary", [b"a\0", b"\xff\0", b""]),
    "string": (["a\0", None, "\u00e4"], "string", [b"a\0", b"", b"\xc3\xa4"]),
}


def _table(columns, **features):
    return datasets.Dataset.from_dict(
        columns, features=datasets.Features(features)
    )


def _records(source):
    records = source.sample(source.num_records)
    return list(records.map(source.decode) if source.decode else records)


class HuggingFaceTest(tf.test.TestCase, parameterized.TestCase):
    def test_values_are_those_of_the_columns(self):
        table = _table(
            {name: values for name, (values, _, _) in _COLUMNS.items()},
            **{name: datasets.Value(k) for name, (_, k, _) in _COLUMNS.items()},
        )
        pipeline = data.pipeline(
            data.hugging_face(table), batch_size=3, shuffle=False
        )
        (batch,) = pipeline.as_numpy_iterator()
        self.assertEqual(list(batch), list(_COLUMNS))
        for name, (_, dtype, want) in _COLUMNS.items():
            if dtype in ("binary", "string"):
                self.assertEqual(batch[name].tolist(), want)
            else:
                np.testing.assert_array_equal(batch[name], want)
                self.assertEqual(batch[name].dtype, dtype)

    def test_arrays_and_images_of_any_size(self):
        small, large = (
            np.arange(h * w * 3, dtype=np.uint8).reshape(h, w, 3)
            for h, w in ((2, 3), (4, 1))
        )
        table = _table(
            {
                "image": [PIL.Image.fromarray(a) for a in (small, large)],
                "list": [[1, 2], [3]],
                "nested": [[[1.0, 2.0]], [[3.0, 4.0], [5.0, None]]],
                "array": np.arange(8).reshape(2, 2, 2).tolist(),
            },
            image=datasets.Image(),
            list=datasets.List(datasets.Value("int16")),
            nested=datasets.List(datasets.List(datasets.Value("float64"))),
            array=datasets.Array2D((2, 2), "int32"),
        )
        source = data.hugging_face(table.select([1, 0]))
        second, first = _records(source)
        self.assertAllEqual(first["image"], small)
        self.assertAllEqual(second["image"], large)
        self.assertAllEqual(second["list"], [3])
        self.assertAllEqual(first["nested"], [[1.0, 2.0]])
        self.assertAllEqual(second["nested"], [[3.0, 4.0], [5.0, np.nan]])
        self.assertAllEqual(second["array"], [[4, 5], [6, 7]])
        dtypes = {name: part.dtype.name for name, part in first.items()}
        self.assertEqual(
            dtypes,
            {
                "image": "uint8",
                "list": "int16",
                "nested": "float64",
                "array": "int32",
            },
        )
        pipeline = data.pipeline(
            source,
            parse=lambda row: tf.image.resize(row["image"], [2, 2]),
            batch_size=2,
        )
        self.assertEqual(next(iter(pipeline)).shape, [2, 2, 2, 3])

    def test_arrays_of_one_shape_are_read_in_batches(self):
        ids = np.arange(2100 * 4).reshape(2100, 2, 2)
        table = _table(
            {"ids": ids.reshape(2100, 4).tolist(), "array": ids.tolist()},
            ids=datasets.List(datasets.Value("int32")),
            array=datasets.Array2D((2, 2), "float64"),
        )
        pipeline = data.pipeline(
            data.hugging_face(table.select(range(2099, -1, -1))),
            batch_size=1050,
            shuffle=False,
            cache="none",
        )
        self.assertTrue(pipeline.recipe.batchwise, pipeline.recipe.parse_reason)
        _, last = pipeline.as_numpy_iterator()
        self.assertAllEqual(last["array"], ids[:1050][::-1])
        self.assertAllEqual(last["ids"], ids[:1050][::-1].reshape(1050, 4))

    @parameterized.named_parameters(
        (
            "image",
            {"x": [PIL.Image.new("L", (2, 2)), PIL.Image.new("RGB", (2, 2))]},
            datasets.Image(),
            r"'x' with uint8 of shape \(2, 2, 3\).*mode='RGB'",
        ),
        (
            "missing",
            {"x": [PIL.Image.new("L", (2, 2)), None]},
            datasets.Image(),
            "column 'x', row 1, which has none.*filter",
        ),
        (
            "no_image",
            {
                "x": [
                    PIL.Image.new("L", (2, 2)),
                    {"bytes": b"no image", "path": None},
                ]
            },
            datasets.Image(),
            "cannot be decoded.*column 'x', row 1",
        ),
        (
            "ragged",
            {"x": [[[1, 2]], [[1], [1, 2]]]},
            datasets.List(datasets.List(datasets.Value("int64"))),
            r"column 'x', row 1: lengths \[1, 2\]",
        ),
    )
    def test_rows_that_make_no_array_are_named(self, columns, feature, error):
        source = data.hugging_face(_table(columns, x=feature))
        with self.assertRaisesRegex(tf.errors.OpError, error):
            _records(source)

    def test_what_cannot_be_read_is_refused(self):
        table = _table({"x": [1]}, x=datasets.Value("int64"))
        for dataset in (
            datasets.DatasetDict({"train": table}),
            table.to_pandas(),
            {"train": None},
        ):
            with self.assertRaisesRegex(TypeError, "one split.*Received: a "):
                data.hugging_face(dataset)
        for values in ([{"a": 1}], [["a"]]):
            other = datasets.Dataset.from_dict({"when": [values]})
            with self.assertRaisesRegex(TypeError, "'when' of "):
                data.hugging_face(other)
        streamed = table.to_iterable_dataset()
        for dataset, kwargs in ((table, {"num_records": 1}), (streamed, {})):
            with self.assertRaisesRegex(ValueError, "num_records"):
                data.hugging_face(dataset, **kwargs)
        with self.assertRaisesRegex(ValueError, "is empty"):
            data.hugging_face(streamed.take(0), num_records=1)
        with self.assertRaisesRegex(ValueError, "is empty"):
            data.hugging_face(table.select([]))
        for columns in ("x", ["y"], []):
            with self.assertRaisesRegex(ValueError, "list of columns.*'x'"):
                data.hugging_face(table, columns)

    def test_a_transform_is_run_on_the_rows_that_are_read(self):
        table = _table(
            {"x": [1, 2, 3], "y": ["a", "b\0", "c"]},
            x=datasets.Value("int64"),
            y=datasets.Value("string"),
        )
        ran = []

        def transform(batch):
            ran.append(batch["x"])
            return {
                "image": [np.full([x, 2], x, np.uint8) for x in batch["x"]],
                # An integer among them is as much.
                "half": [x // 2 if x == 2 else x / 2 for x in batch["x"]],
                "none": [float("nan") for _ in batch["x"]],
                "name": batch["y"],
                "words": [[y, "w"] for y in batch["y"]],
            }

        table.set_transform(transform)
        source = data.hugging_face(table)
        first, second, third = _records(source)
        self.assertEqual(
            list(first), ["image", "half", "none", "name", "words"]
        )
        self.assertAllEqual(second["none"], np.nan)
        self.assertAllEqual(first["image"], np.full([1, 2], 1, np.uint8))
        self.assertAllEqual(third["image"], np.full([3, 2], 3, np.uint8))
        self.assertEqual(second["half"], 1.0)
        self.assertEqual(second["half"].dtype, tf.float64)
        self.assertEqual(second["name"], b"b\0")
        self.assertAllEqual(third["words"], [b"c", b"w"])
        ran.clear()
        pipeline = data.pipeline(
            data.hugging_face(table, ["half"]), batch_size=3, cache="none"
        )
        found = next(iter(pipeline))["half"].numpy()
        self.assertEqual(sorted(found), [0.5, 1.0, 1.5])

    def test_a_transform_that_no_pipeline_can_run(self):
        table = _table({"x": [1, 2]}, x=datasets.Value("int64"))
        draw = np.random.default_rng(0).random
        for transform, error, words in (
            (lambda b: {"x": [draw() for _ in b["x"]]}, ValueError, "augment"),
            (
                lambda b: {"x": [None for _ in b["x"]]},
                TypeError,
                "'x' with a N",
            ),
            (lambda b: {"x": [1, 2, 3]}, ValueError, "3 of 1 in column 'x'"),
            # 2.5 was 2, because the row before it was an integer.
            (
                lambda b: {"x": [x if x < 2 else 2.5 for x in b["x"]]},
                ValueError,
                "'x' with float64 .* of int64",
            ),
            (
                lambda b: {"x": [x if x < 2 else [x] for x in b["x"]]},
                ValueError,
                "shape .1,. after 0",
            ),
            (
                lambda b: {"x": ["a" if x < 2 else x for x in b["x"]]},
                ValueError,
                "'x' with int64 .* of string",
            ),
        ):
            with self.assertRaisesRegex(error, words):
                data.hugging_face(table.with_transform(transform))

    @parameterized.parameters(False, True)
    def test_what_is_streamed_is_read_and_resumed(self, mapped):
        pixels = [np.full([2, 2 + n % 2], n, np.uint8) for n in range(70)]
        table = _table(
            {
                "n": list(range(70)),
                "image": [PIL.Image.fromarray(p) for p in pixels],
                "ids": [[n] * (n % 3) for n in range(70)],
            },
            n=datasets.Value("int16"),
            image=datasets.Image(),
            ids=datasets.List(datasets.Value("int32")),
        )
        streamed = table.to_iterable_dataset()
        if mapped:  # after which it knows no features
            streamed = streamed.select_columns(["n"]).map(
                lambda row: {"twice": 2 * row["n"]}
            )
        source = data.hugging_face(streamed, num_records=66)
        for number, record in enumerate(_records(source)):
            self.assertEqual(record["n"], number)
            if mapped:
                self.assertEqual(record["twice"], 2 * number)
            else:
                self.assertAllEqual(record["image"], pixels[number])
                self.assertAllEqual(record["ids"], [number] * (number % 3))
        pipeline = data.pipeline(
            source, parse=lambda row: row["n"], batch_size=11
        )
        whole = np.concatenate(list(pipeline.as_numpy_iterator()))
        self.assertEqual(sorted(whole), list(range(66)))
        again = data.pipeline(source, parse=lambda row: row["n"], batch_size=11)
        again.position.assign(index=33)
        rest = np.concatenate(list(again.as_numpy_iterator()))
        self.assertAllEqual(rest, whole[33:])


if __name__ == "__main__":
    absltest.main()
