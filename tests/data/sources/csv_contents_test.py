"""What CSV files of users hold, and what is said of what cannot be read."""

import os
import tracemalloc

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests.data import record_files
from tfscale import data


class CsvTest(tf.test.TestCase, parameterized.TestCase):
    def _csv(self, contents, **kwargs):
        path = os.path.join(self.create_tempdir(), "a.csv")
        record_files.write(path, contents)
        kwargs.setdefault("dtypes", {"a": "int32"})
        return data.csv(path, **kwargs)

    def _values(self, source):
        pipeline = data.pipeline(source, batch_size=99, shuffle=False)
        (batch,) = pipeline.as_numpy_iterator()
        return batch

    @parameterized.parameters(
        (b"a,b\n1,2\nx,4\n5,6\n", "'a'.*int32.*'x'", 8),
        (b"a,b\n1,2\n3\n5,6\n", "2 columns, got 1", 8),
        (b"a,b\n1,2\n3,4,5\n5,6\n", "2 columns, got 3", 8),
        (b"a,b\r\n1,2\r\nx,4\r\n5,6", "'a'.*int32.*'x'", 10),
        (b'a,b\n1,2\n3,"5,6', "Quoted field", 8),
    )
    @pytest.mark.crossing(every=2)
    def test_a_damaged_line_is_named_before_the_first_step(
        self, contents, reason, offset
    ):
        with self.assertRaisesRegex(
            tf.errors.DataLossError, rf"{reason}.*a.csv, offset {offset}"
        ):
            self._csv(contents)

    def test_damaged_lines_are_skipped_and_counted(self):
        lines = [b"%d,%d" % (n, n) for n in range(50)]
        damaged = (0, 17, 18, 49)
        for number in damaged:
            lines[number] = b"x,1"
        contents = b"\n".join([b"a,b", *lines])
        with self.assertWarnsRegex(UserWarning, "4 damaged lines of 1 "):
            source = self._csv(contents, on_damage="skip")
        self.assertEqual(source.num_skipped, 4)
        self.assertEqual(
            self._values(source)["a"].tolist(),
            [n for n in range(50) if n not in damaged],
        )

    @parameterized.product(newline=(b"\n", b"\r\n"), ended=(True, False))
    @pytest.mark.crossing(every=4)
    def test_a_stray_quote_damages_its_line_only(self, newline, ended):
        # All lines up to the next quote were one damaged line with it.
        lines = [
            b'\xef\xbb\xbf"a",b',
            b"1,x",
            b'2,5" pipe',
            b'"3","ok"',
            b'4,"left open',
            b'5,""',
            b'"6","in two' + newline + b'lines, ""6"""',
            b'"7" ,z',
            b'8,5" and "more"',
            b"9,y",
            b'10,"to the end',
        ]
        contents = newline.join([*lines, b""] if ended else lines)
        with self.assertWarnsRegex(UserWarning, "5 damaged lines"):
            source = self._csv(
                contents,
                dtypes={"a": "int32", "b": "string"},
                on_damage="skip",
            )
        found = self._values(source)
        self.assertEqual(found["a"].tolist(), [1, 3, 5, 6, 9])
        self.assertEqual(
            found["b"].tolist(),
            [b"x", b"ok", b"", b"in two" + newline + b'lines, "6"', b"y"],
        )

    def test_it_takes_some_times_the_memory_of_the_file(self):
        # It took 17 times as much, to count the quotes.
        contents = b"a,b\n" + b'1,"%s"\n' % (b"x" * 1000) * 1000
        tracemalloc.start()
        try:
            self._csv(contents, dtypes={"b": "string"})
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        self.assertLess(most, 5 * len(contents))

    @parameterized.parameters(
        b"\xef\xbb\xbfa,b\n1,2\n",
        b"a,b\r\n1,2\r\n\r\n",
        b'b,"x,y","a"\n3,4,1\n',
        b"\na,b\n\n1,2",
        b"a,\xe9\n1,2\n",
    )
    def test_as_programs_write_it(self, contents):
        self.assertEqual(self._values(self._csv(contents))["a"], [1])

    def test_a_file_without_a_line_among_others(self):
        folder = self.create_tempdir().full_path
        record_files.write(os.path.join(folder, "0.csv"), b"")
        record_files.write(os.path.join(folder, "1.csv"), b"a\n1\n")
        source = data.csv(folder + "/*", dtypes={"a": "int32"})
        self.assertEqual(self._values(source)["a"], [1])

    def test_files_of_other_columns_are_named(self):
        # Of 10,000 files, no error said which.
        folder = self.create_tempdir().full_path
        for number, columns in enumerate((b"a,b", b"a,b", b"a,c")):
            record_files.write(f"{folder}/{number}.csv", columns + b"\n1,2\n")
        with self.assertRaisesRegex(
            ValueError, r"'b'\] in .*/0.csv; .*'c'\] in .*/2.csv"
        ):
            data.csv(folder + "/*", dtypes={"a": "int32"})

    @parameterized.parameters("int32", np.int64, tf.float32, float, str, bool)
    @pytest.mark.crossing(every=6)
    def test_a_dtype_by_any_of_its_names(self, dtype):
        source = self._csv(b"a\n1\n", dtypes={"a": dtype})
        self.assertLen(self._values(source)["a"], 1)

    @parameterized.parameters("uint8", "complex64", "number")
    def test_a_dtype_that_a_column_cannot_have(self, dtype):
        with self.assertRaisesRegex(ValueError, f"'{dtype}' for 'a'"):
            self._csv(b"a\n1\n", dtypes={"a": dtype})

    @parameterized.parameters(
        {"dtypes": {}}, {"delimiter": ";;"}, {"on_damage": "warn"}
    )
    def test_as_it_cannot_be_read(self, **kwargs):
        (name,) = kwargs
        with self.assertRaisesRegex(ValueError, f"`{name}`.*{name}="):
            self._csv(b"a,b\n1,2\n", **kwargs)


if __name__ == "__main__":
    tf.test.main()
