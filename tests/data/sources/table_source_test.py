"""Parquet and JSON lines: values and bad input. The rest is in the contract."""

import datetime
import json
import os

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale import data

_COLUMNS = {
    "a": np.arange(7, dtype=np.int16),
    "b": np.arange(7) / 3,
    "c": ["", "x", "\u00e4\u00f6", "long " * 50, "1", "2", "3"],
    "d": np.arange(7) % 2 == 0,
    "u": np.arange(7).astype(np.uint64) + (1 << 63),
    "e": [b"\x00", b"\xff\x00", b"", b"1", b"2", b"3", b"4"],
}


class TableTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.create_tempdir().full_path

    def _parquet(self, columns=_COLUMNS, name="a.parquet", rows=3):
        path = os.path.join(self.folder, name)
        pyarrow.parquet.write_table(
            pyarrow.table(columns), path, row_group_size=rows
        )
        return path

    def _lines(self, *lines):
        path = os.path.join(self.folder, "a.jsonl")
        with open(path, "w") as file:
            file.write("\n".join(lines) + "\n")
        return path

    def _batch(self, source):
        pipeline = data.pipeline(source, batch_size=99, shuffle=False)
        (batch,) = pipeline.as_numpy_iterator()
        return batch

    @parameterized.parameters(False, True)
    @pytest.mark.crossing(every=2)
    def test_values_of_every_kind(self, remote):
        path = self._parquet()
        if remote:
            tf.io.gfile.copy(path, "ram://values.parquet", overwrite=True)
            path = "ram://values.parquet"
        batch = self._batch(data.parquet(path))
        self.assertEqual(list(batch), list(_COLUMNS))
        for name in "abdu":
            self.assertAllEqual(batch[name], _COLUMNS[name])
            self.assertEqual(batch[name].dtype, _COLUMNS[name].dtype)
        self.assertEqual([c.decode() for c in batch["c"]], _COLUMNS["c"])
        self.assertEqual(batch["e"].tolist(), _COLUMNS["e"])

    def test_columns_that_are_asked_for(self):
        batch = self._batch(data.parquet(self._parquet(), columns=["e", "a"]))
        self.assertEqual(list(batch), ["e", "a"])

    def test_what_is_missing(self):
        path = self._lines('{"x": 1, "y": "a"}', '{"y": null}', '{"x": 3}')
        batch = self._batch(data.json_lines(path))
        self.assertEqual(batch["x"].tolist(), [1, 0, 3])
        self.assertEqual(batch["y"].tolist(), [b"a", b"", b""])

    def test_a_damaged_line(self):
        path = self._lines('{"x": 1}', '{"x": ', "[1]", '{"x": 4}')
        with self.assertRaisesRegex(
            tf.errors.DataLossError, rf"{path}, offset \d+, line 2"
        ):
            data.json_lines(path)
        with self.assertWarnsRegex(UserWarning, "2 damaged lines"):
            source = data.json_lines(path, on_damage="skip")
        self.assertEqual(self._batch(source)["x"].tolist(), [1, 4])

    @parameterized.parameters("null", "5", '{"x": "\udcff"}', '{"x": 2}' * 2)
    @pytest.mark.crossing(every=4)
    def test_a_line_that_only_python_refuses(self, line):
        # Pyarrow reads some of these, and ended the process at `null`.
        path = self._lines('{"x": 1}')
        with open(path, "ab") as file:
            file.write(line.encode("utf-8", "surrogateescape"))
        with self.assertRaisesRegex(
            tf.errors.DataLossError, rf"{path}, offset \d+, line 2"
        ):
            data.json_lines(path)
        with self.assertWarnsRegex(UserWarning, "1 damaged lines"):
            source = data.json_lines(path, on_damage="skip")
        self.assertEqual(self._batch(source)["x"].tolist(), [1])

    def test_a_line_that_only_pyarrow_refuses(self):
        # Half of a surrogate pair is a string of Python. One such line made
        # the whole file unreadable, also with "skip".
        lines = ['{"x": 1}', "", '{"x": "\\ud83d"}', '{"x": 1, "x": 2}']
        path = self._lines(*lines, '{"x": 4}')
        with self.assertRaisesRegex(
            tf.errors.DataLossError, rf"{path}, offset \d+, line 3"
        ):
            data.json_lines(path)
        with self.assertWarnsRegex(UserWarning, "2 damaged lines"):
            source = data.json_lines(path, on_damage="skip")
        self.assertEqual(self._batch(source)["x"].tolist(), [1, 4])

    def test_files_of_lines_that_differ_as_lines_do(self):
        # JSON has no schema: it was refused what happened to be whole numbers
        # or dates in one file, and a key that another file lacks.
        for number, lines in enumerate(
            (
                '{"x": 1, "when": "2020-01-01", "other": 1}\n',
                '{"y": "a", "x": 2.5, "when": "2020-01-01 00:00:00"}\r\n\n',
                '{"x": null, "when": "never", "other": "b"}',
            )
        ):
            with open(f"{self.folder}/{number}.jsonl", "w") as file:
                file.write(lines)
        source = data.json_lines(self.folder + "/*", columns=["x", "y", "when"])
        batch = self._batch(source)
        np.testing.assert_array_equal(batch["x"], [1, 2.5, np.nan])
        self.assertEqual(batch["y"].tolist(), [b"", b"a", b""])
        self.assertEqual(batch["when"][0], b"2020-01-01")
        self.assertEqual(batch["when"][2], b"never")
        with self.assertRaisesRegex(ValueError, "one type.*2.jsonl.*other"):
            data.json_lines(self.folder + "/*")
        with self.assertRaisesRegex(ValueError, "one type.*a.jsonl.*/x"):
            data.json_lines(self._lines('{"x": 1}', '{"x": "a"}'))

    def test_keys_that_are_not_read_may_have_any_values(self):
        # They were refused within a file, and not among files.
        path = self._lines(
            '{"x": 1, "meta": "a"}',
            '{"meta": {"b": [1]}, "x": 2.5}',
            '{"meta": [true]}',
        )
        batch = self._batch(data.json_lines(path, columns=["x"]))
        np.testing.assert_array_equal(batch["x"], [1, 2.5, np.nan])
        with self.assertRaisesRegex(ValueError, "one type.*a.jsonl.*/meta"):
            data.json_lines(path)

    def test_a_line_that_is_longer_than_a_block(self):
        path = self._lines('{"x": "%s"}' % ("a" * 3_000_000), '{"x": "b"}')
        batch = self._batch(data.json_lines(path))
        self.assertEqual([len(x) for x in batch["x"]], [3_000_000, 1])

    def test_files_without_a_row(self):
        for source in (
            data.json_lines(self._lines("")),
            data.parquet(self._parquet({"x": pyarrow.array([], "int8")})),
        ):
            with self.assertRaisesRegex(ValueError, "must not be empty"):
                self._batch(source)

    def test_parquet_files_that_differ_in_what_is_not_read(self):
        fields = [
            pyarrow.field("x", pyarrow.int8()),
            pyarrow.field("x", pyarrow.int8(), nullable=False),
        ]
        for name, field, other in zip("ab", fields, ([1], ["b"]), strict=True):
            x = pyarrow.table({"x": [1]}, pyarrow.schema([field]))
            y = {"y": pyarrow.array([name]), "other": pyarrow.array(other)}
            table = x.append_column("y", y["y"]).append_column(
                "other", y["other"]
            )
            order = ["x", "y", "other"] if name == "a" else ["other", "y", "x"]
            path = os.path.join(self.folder, name)
            pyarrow.parquet.write_table(table.select(order), path)
        files = self.folder + "/*"
        batch = self._batch(data.parquet(files, columns=["x", "y"]))
        self.assertEqual(batch["y"].tolist(), [b"a", b"b"])
        with self.assertRaisesRegex(ValueError, "same columns.*/b with"):
            data.parquet(files)

    def test_a_damaged_file(self):
        path = self._parquet()
        os.truncate(path, os.path.getsize(path) - 20)
        with self.assertRaisesRegex(tf.errors.DataLossError, path):
            data.parquet(path)

    def test_a_file_damaged_in_the_middle_is_named(self):
        path = self._parquet({"c": ["word" * 99] * 9})
        with open(path, "r+b") as file:
            file.seek(10)
            file.write(bytes(200))
        with self.assertRaisesRegex(tf.errors.OpError, path):
            self._batch(data.parquet(path))

    @parameterized.parameters("parquet", "json_lines")
    @pytest.mark.crossing(every=2)
    def test_a_file_that_lost_rows_afterwards_is_named(self, builder):
        if builder == "parquet":
            path = self._parquet({"x": [1, 2]})
        else:
            path = self._lines('{"x": 1}', '{"x": 2}')
        source = getattr(data, builder)(path)
        if builder == "parquet":
            self._parquet({"x": [1]})
        else:
            self._lines('{"x": 1}')
        with self.assertRaisesRegex(
            tf.errors.OpError, rf"{path} with \d+ bytes where there were \d+"
        ):
            self._batch(source)

    def test_values_that_a_dictionary_numbers(self):
        columns = {
            "x": pyarrow.array(["b", None, "a", "b"]).dictionary_encode(),
            "y": pyarrow.array([7, 5, None, 7]).dictionary_encode(),
        }
        batch = self._batch(data.parquet(self._parquet(columns)))
        self.assertEqual(batch["x"].tolist(), [b"b", b"", b"a", b"b"])
        self.assertEqual(batch["y"].tolist(), [7, 5, 0, 7])

    @parameterized.parameters(
        pyarrow.list_(pyarrow.int64()),
        pyarrow.large_list(pyarrow.int16()),
        pyarrow.list_(pyarrow.float32()),
        pyarrow.list_(pyarrow.bool_()),
    )
    @pytest.mark.crossing(every=4)
    def test_lists_of_numbers(self, kind):
        # As many as are tried to be parsed by batches are of one length.
        lists = [[1, 0, 1]] * 3000 + [[], None, [0], [1, 1, 0, 1]]
        column = pyarrow.array(lists, pyarrow.list_(pyarrow.int64()))
        path = self._parquet({"x": column.cast(kind)}, rows=999)
        source = data.parquet(path)

        def padded(record):
            size = tf.shape(record["x"])[0]
            numbers = tf.cast(record["x"], tf.int64)
            return tf.ensure_shape(tf.pad(numbers, [[0, 4 - size]]), [4]), size

        pipeline = data.pipeline(
            source, batch_size=4, shuffle=False, parse=padded
        )
        *_, (rows, sizes) = pipeline.as_numpy_iterator()
        self.assertAllEqual(sizes, [0, 0, 1, 4])
        self.assertAllEqual(
            rows, [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1]]
        )
        record = next(iter(source.sample(1).map(source.decode)))["x"]
        self.assertEqual(record.dtype, tf.as_dtype(str(kind.value_type)))

    def test_dates_and_times_are_the_integers_of_the_file(self):
        day = datetime.date(2024, 2, 29)
        moment = datetime.datetime(2024, 2, 29, 12, 30, 0, 7)
        utc = moment.replace(tzinfo=datetime.UTC)
        micros = 1709209800_000007
        kinds = {
            "date": (pyarrow.date32(), day, np.int32(19782)),
            "us": (pyarrow.timestamp("us"), moment, np.int64(micros)),
            "ns": (pyarrow.timestamp("ns"), moment, np.int64(micros * 1000)),
            "zone": (pyarrow.timestamp("us", "CET"), utc, np.int64(micros)),
            "time": (pyarrow.time64("us"), moment.time(), 45_000_000_007),
            "span": (
                pyarrow.duration("ms"),
                datetime.timedelta(seconds=2),
                2000,
            ),
            "list": (pyarrow.list_(pyarrow.date32()), [day], [np.int32(19782)]),
        }
        columns = {
            name: pyarrow.array([value, None], kind)
            for name, (kind, value, _) in kinds.items()
        }
        source = data.parquet(self._parquet(columns))
        first, second = source.sample(2).map(source.decode)
        for name, (_, _, wanted) in kinds.items():
            self.assertAllEqual(first[name], wanted)
            self.assertEqual(first[name].dtype, np.asarray(wanted).dtype)
            self.assertAllEqual(second[name], [] if name == "list" else 0)

    @parameterized.parameters("json_lines", "parquet")
    @pytest.mark.crossing(every=2)
    def test_objects_and_lists_of_lists(self, builder):
        records = [
            {
                "user": {"name": "a", "at": {"x": 1, "y": 0.5}},
                "words": ["u", "", "\u00e4v"],
                "turns": [
                    {"role": "q", "ids": [1, 2]},
                    {"role": "answer", "ids": [3, 4]},
                ],
                "matrix": [[1, 2, 3], [4, 5, 6]],
                "days": ["2020-01-01"],
            },
            {"user": None, "turns": [], "matrix": [[7], [8]], "days": []},
            {"user": {"at": {"x": 2}}, "words": ["last"]},
        ]
        if builder == "parquet":
            source = data.parquet(
                self._parquet(
                    {key: [r.get(key) for r in records] for key in records[0]}
                )
            )
        else:
            source = data.json_lines(self._lines(*map(json.dumps, records)))
        first, second, third = source.sample(3).map(source.decode)
        self.assertEqual(first["user"]["name"], b"a")
        self.assertEqual(first["user"]["at"]["x"], 1)
        self.assertEqual(first["user"]["at"]["y"], 0.5)
        self.assertAllEqual(first["words"], [b"u", b"", b"\xc3\xa4v"])
        self.assertAllEqual(first["turns"]["role"], [b"q", b"answer"])
        self.assertAllEqual(first["turns"]["ids"], [[1, 2], [3, 4]])
        self.assertAllEqual(first["matrix"], [[1, 2, 3], [4, 5, 6]])
        self.assertAllEqual(first["days"], [b"2020-01-01"])
        self.assertEqual(second["user"]["name"], b"")
        self.assertEqual(second["user"]["at"]["x"], 0)
        self.assertAllEqual(second["words"], [])
        self.assertAllEqual(second["turns"]["ids"], np.zeros([0, 0]))
        self.assertAllEqual(second["matrix"], [[7], [8]])
        self.assertAllEqual(third["matrix"], np.zeros([0, 0]))
        self.assertAllEqual(third["words"], [b"last"])
        self.assertEqual(third["user"]["at"]["x"], 2)

    def test_objects_go_through_a_pipeline(self):
        # So many that they are parsed by batches where that can be.
        lines = (f'{{"a": {{"b": {n}, "c": "x"}}}}' for n in range(3000))
        source = data.json_lines(self._lines(*lines))
        pipeline = data.pipeline(source, batch_size=3000, shuffle=False)
        (batch,) = pipeline.as_numpy_iterator()
        self.assertEqual(batch["a"]["b"].tolist(), list(range(3000)))
        self.assertEqual(batch["a"]["c"].tolist(), [b"x"] * 3000)

    def test_keys_of_objects_that_only_some_files_have(self):
        for number, line in enumerate(
            ('{"a": {"b": 1, "l": []}}', '{"a": {"l": [2.5], "c": "x"}}')
        ):
            with open(f"{self.folder}/{number}.jsonl", "w") as file:
                file.write(line)
        source = data.json_lines(self.folder + "/*")
        first, second = source.sample(2).map(source.decode)
        self.assertEqual(first["a"]["b"], 1)
        self.assertAllEqual(first["a"]["l"], [])
        self.assertAllEqual(second["a"]["l"], [2.5])
        self.assertEqual(second["a"]["c"], b"x")

    def test_lists_within_a_row_that_are_no_array_are_named(self):
        path = self._lines('{"m": [[1], [2]]}', '{"m": [[1, 2], [3]]}')
        with self.assertRaisesRegex(
            tf.errors.OpError, r"column 'm', row 1: lengths \[1, 2\].*" + path
        ):
            self._batch(data.json_lines(path))

    def test_lists_of_one_size(self):
        column = pyarrow.array(
            [[1, 2], None, [3, None]], pyarrow.list_(pyarrow.int8(), 2)
        )
        source = data.parquet(self._parquet({"x": column}))
        rows = [
            r["x"].numpy().tolist() for r in source.sample(3).map(source.decode)
        ]
        self.assertEqual(rows, [[1, 2], [], [3, 0]])

    def test_columns_that_cannot_be_read_are_named(self):
        maps = pyarrow.array(
            [[("a", 1)]] * 2, pyarrow.map_(pyarrow.string(), pyarrow.int8())
        )
        path = self._parquet({"x": maps, "y": [1, 2]})
        with self.assertRaisesRegex(ValueError, "'x' of map<"):
            data.parquet(path)
        self.assertEqual(data.parquet(path, columns=["y"]).num_records, 2)
        for columns in (["z"], "y", []):
            with self.assertRaisesRegex(ValueError, "list of columns.*'y'"):
                data.parquet(path, columns=columns)
        twice = pyarrow.table([[1], [2]], names=["x", "x"])
        pyarrow.parquet.write_table(twice, self.folder + "/twice")
        with self.assertRaisesRegex(ValueError, "each there once"):
            data.parquet(self.folder + "/twice")
        os.remove(self.folder + "/twice")
        self._parquet({"y": ["a", "b"]}, "b.parquet")
        with self.assertRaisesRegex(ValueError, "same columns.*b.parquet"):
            data.parquet(self.folder + "/*", columns=["y"])


if __name__ == "__main__":
    absltest.main()
