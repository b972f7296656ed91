"""What a CSV file that cannot be read is refused with: its name and line."""

import gzip
import os

import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale import data


class CsvTest(tf.test.TestCase, parameterized.TestCase):
    def _path(self, contents):
        path = os.path.join(self.create_tempdir().full_path, "a.csv")
        with open(path, "wb") as file:
            file.write(contents)
        return path

    @parameterized.parameters(
        b"PAR1\x15\x04\x15\xd0\r\x15\n\x00\x00\x01",
        b"PAR1\x15\x04\x15\xd0\x00\x00\x01",
        gzip.compress(b"age,name\n1,a\n", mtime=0),
        b"PK\x03\x04\x14\x00\x06\x00\x08\x00!\x00\n",
    )
    def test_a_file_of_another_format_is_named(self, contents):
        path = self._path(contents)
        with self.assertRaisesRegex(
            tf.errors.DataLossError, "another format.*file .*a.csv, line 1"
        ):
            data.csv(path, dtypes={"age": "int32"})

    def test_a_parquet_file_is_none(self):
        import pyarrow
        from pyarrow import parquet

        path = os.path.join(self.create_tempdir().full_path, "a.csv")
        names = [f"n{number}" for number in range(37)]
        parquet.write_table(
            pyarrow.table({"age": list(range(37)), "name": names}), path
        )
        with self.assertRaisesRegex(
            tf.errors.DataLossError, "another format.*file .*a.csv, line 1"
        ):
            data.csv(path, dtypes={"age": "int32"})

    def test_a_damaged_line_is_counted_as_editors_do(self):
        path = self._path(b'a,b\n1,"x\ny"\n\nz,4\n')
        with self.assertRaisesRegex(
            tf.errors.DataLossError, "a.csv, offset 13, line 5"
        ):
            data.csv(path, dtypes={"a": "int32"})

    @parameterized.parameters(
        # What tf.data said of it named neither the file nor the column.
        ("x,x\n1,2\n", {}, "there once.*'x', 'x'"),
        # All lines were damaged, it said.
        ("x\u00e9y\n1\u00e92\n", {"delimiter": "\u00e9"}, "one ASCII"),
    )
    def test_columns_that_cannot_be_told_apart(self, text, arguments, error):
        path = self.create_tempfile(content=text).full_path
        with self.assertRaisesRegex(ValueError, error):
            data.csv(path, dtypes={"x": "int32"}, **arguments)

    def test_a_file_that_changed_is_named(self):
        # Its new lines were cut where those before had been.
        path = self._path(b"x,y\n1,2\n3,4\n")
        source = data.csv(path, dtypes={"y": "int32"})
        pipeline = data.pipeline(source, batch_size=2, cache="none")
        with open(path, "ab") as file:
            file.write(b"5,6\n")
        with self.assertRaisesRegex(
            tf.errors.OpError, f"must not change.*{path} with 16 .* were 12"
        ):
            list(pipeline)

    def test_booleans_as_programs_write_them(self):
        words = ["true", "True", "TRUE", "1", "false", "False", "FALSE", "0"]
        words += [" true ", ""]
        wanted = [True] * 4 + [False] * 4 + [True, False]
        # So many that they are parsed by batches, too.
        for times in (1, 300):
            lines = "".join(f"{n},{w}\n" for n, w in enumerate(words * times))
            source = data.csv(
                self._path(b"a,b\n" + lines.encode()),
                dtypes={"a": "int32", "b": "bool"},
                label="b",
            )
            pipeline = data.pipeline(source, batch_size=9999, shuffle=False)
            ((_, found),) = pipeline.as_numpy_iterator()
            self.assertEqual(found.dtype, bool)
            self.assertEqual(found.tolist(), wanted * times)

    def test_a_field_that_is_no_boolean_is_named(self):
        path = self._path(b"a,b\n1,true\n2,maybe\n3,0\n")
        dtypes = {"a": "int32", "b": "bool"}
        with self.assertRaisesRegex(
            tf.errors.DataLossError, "not a valid bool: maybe.*a.csv.*line 3"
        ):
            data.csv(path, dtypes=dtypes)
        with self.assertWarnsRegex(UserWarning, "1 damaged lines"):
            source = data.csv(path, dtypes=dtypes, on_damage="skip")
        self.assertEqual(source.num_records, 2)


if __name__ == "__main__":
    absltest.main()
