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


if __name__ == "__main__":
    absltest.main()
