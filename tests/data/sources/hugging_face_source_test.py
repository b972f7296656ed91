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
    return list(source.sample(source.num_records).map(source.decode))


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
            table.to_iterable_dataset(),
            table.to_pandas(),
            {"train": None},
        ):
            with self.assertRaisesRegex(TypeError, "one split.*Received: a "):
                data.hugging_face(dataset)
        for values in ([{"a": 1}], [["a"]]):
            other = datasets.Dataset.from_dict({"when": [values]})
            with self.assertRaisesRegex(TypeError, "'when' of "):
                data.hugging_face(other)
        with self.assertRaisesRegex(ValueError, "transform is not run"):
            data.hugging_face(table.with_transform(lambda batch: batch))
        with self.assertRaisesRegex(ValueError, "is empty"):
            data.hugging_face(table.select([]))
        for columns in ("x", ["y"], []):
            with self.assertRaisesRegex(ValueError, "list of columns.*'x'"):
                data.hugging_face(table, columns)


if __name__ == "__main__":
    absltest.main()
