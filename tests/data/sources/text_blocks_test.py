"""Files of lines in blocks: no value, order or error depends on their size."""

import itertools
import json
import os
import warnings
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tests.source_files import REPOSITORY
from tfscale import data
from tfscale.data.sources import text_blocks

# Prints how much more memory than a first pipeline took a second one takes.
_LARGE = """
import sys
import tensorflow as tf
from tfscale import data

def first(path):
    if path.endswith("csv"):
        source = data.csv(path, dtypes={"a": "int64"})
    else:
        source = data.json_lines(path, columns=["a"])
    options = tf.data.Options()
    options.autotune.ram_budget = 32 << 20
    pipeline = data.pipeline(
        source, batch_size=1000, cache="none", options=options
    )
    return sum(int(tf.reduce_sum(b["a"])) for b in pipeline)

def memory(name):
    with open("/proc/self/status") as file:
        (found,) = (int(l.split()[1]) for l in file if l.startswith(name))
    return found << 10

small, large = sys.argv[1:]
first(small)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak
before = memory("VmRSS")
print("sum", first(large), memory("VmHWM") - before)
"""


class TextBlocksTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = os.path.join(self.create_tempdir().full_path, "a")

    def _write(self, contents):
        with open(self.path, "wb") as file:
            file.write(contents)

    def _of_blocks(self, size, build):
        with mock.patch.object(text_blocks, "_BLOCK_BYTES", size):
            return build()

    def _values(self, source):
        pipeline = data.pipeline(
            source, batch_size=999, shuffle=False, cache="none"
        )
        return next(pipeline.as_numpy_iterator())

    def _csv(self, **kwargs):
        dtypes = {"a": "int32", "b": "string", "c": "bool"}
        return data.csv(self.path, dtypes=dtypes, **kwargs)

    @parameterized.parameters(*range(8))
    @pytest.mark.crossing(every=8)
    def test_csv_is_read_the_same_in_blocks_of_any_size(self, seed):
        random = np.random.default_rng(seed)
        fields = [
            [b"1", b"-7", b"", b'"12"'] + [b"x"] * (seed % 2),
            [
                *(b"", b"word", b'"a,b"', b'"two\nlines"', b'"a ""b"""'),
                *(b'"\r\n\n"', b'"""\n"""', b'""'),
                *([b'5" pipe', b'"open', b'"a" b', b'"'] * (seed % 3 == 1)),
            ],
            [b"true", b"0", b" FALSE ", b""] + [b"maybe"] * (seed % 2),
        ]
        ends = [b"\n", b"\r\n", b"\n\n"]
        lines = [
            b",".join(f[random.integers(len(f))] for f in fields)
            + b",d" * (random.random() < 0.05 * (seed % 2))
            + ends[random.integers(len(ends))]
            for _ in range(60)
        ]
        self._write(b"a,b,c\n" + b"".join(lines)[: -(seed % 3) or None])
        found = []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "[0-9]+ damaged lines")
            for size in (1 << 20, 1, 64, 300):
                source = self._of_blocks(
                    size, lambda: self._csv(on_damage="skip")
                )
                found.append((source, self._values(source)))
        (whole, values), *others = found
        self.assertLen(whole.blocks, 1)
        self.assertEqual(whole.num_skipped > 0, seed % 2 == 1 or seed == 4)
        for source, other in others:
            self.assertGreater(len(source.blocks), 2)
            self.assertEqual(source.num_skipped, whole.num_skipped)
            for name, wanted in values.items():
                self.assertEqual(other[name].tolist(), wanted.tolist())
        errors = set()
        for size in (1 << 20, 1, 64, 300) if whole.num_skipped else ():
            with self.assertRaises(tf.errors.DataLossError) as caught:
                self._of_blocks(size, self._csv)
            errors.add(str(caught.exception))
        self.assertLen(errors, 1 if whole.num_skipped else 0)

    def test_lines_of_json_are_read_the_same_in_blocks_of_any_size(self):
        rows = [
            {"a": n if n % 3 else n / 2, "b": "x" * (n % 7)}
            | ({"c": {"d": [n]}} if n > 20 else {})
            for n in range(50)
        ]
        lines = [json.dumps(row) for row in rows]
        lines[11], lines[30] = '{"a": ', "null"
        lines.insert(5, "")
        self._write("\n".join(lines).encode())
        found = []
        for size in (1 << 20, 1, 64, 300):
            with self.assertWarnsRegex(UserWarning, "2 damaged"):
                source = self._of_blocks(
                    size, lambda: data.json_lines(self.path, on_damage="skip")
                )
            records = source.sample(99).map(source.decode)
            found.append(
                (
                    len(source.blocks),
                    [
                        (float(r["a"]), r["b"].numpy(), r["c"]["d"].numpy())
                        for r in records
                    ],
                )
            )
            with self.assertRaisesRegex(
                tf.errors.DataLossError, 'line 13: b\'{"a": '
            ):
                self._of_blocks(size, lambda: data.json_lines(self.path))
        (blocks, whole), *others = found
        self.assertEqual(blocks, 1)
        self.assertLen(whole, 48)
        for blocks, values in others:
            self.assertGreater(blocks, 3)
            self.assertAllEqual([v[:2] for v in values], [v[:2] for v in whole])
            for one, other in zip(values, whole, strict=True):
                self.assertAllEqual(one[2], other[2])

    def test_a_quote_that_stays_open_is_looked_for_so_far(self):
        self._write(b'a,b,c\n1,"open,1\n' + b"2,x,1\n" * 100)
        with (
            mock.patch("tfscale.data.sources.csv_source._LONGEST", 200),
            self.assertWarnsRegex(UserWarning, "1 damaged"),
        ):
            source = self._of_blocks(50, lambda: self._csv(on_damage="skip"))
        self.assertEqual(source.num_records, 100)
        self.assertGreater(len(source.blocks), 2)

    @parameterized.parameters("csv", "json_lines")
    @pytest.mark.crossing(every=2)
    def test_order_and_resume_are_exact_over_many_blocks(self, kind):
        if kind == "csv":
            self._write(b"a,b,c\n" + b"".join(b"%d,,\n" % n for n in range(90)))
            build = self._csv
        else:
            self._write(b"".join(b'{"a": %d}\n' % n for n in range(90)))

            def build():
                return data.json_lines(self.path)

        source = self._of_blocks(30, build)
        self.assertGreater(len(source.blocks), 9)
        kwargs = dict(batch_size=8, shuffle=20, cache="none")
        pipeline = data.pipeline(source, **kwargs)
        whole = [b["a"].tolist() for b in pipeline.as_numpy_iterator()]
        order = list(itertools.chain(*whole))
        self.assertCountEqual(order, range(90))
        self.assertNotEqual(order, list(range(90)))
        resumed = data.pipeline(source, **kwargs)
        for stop in (1, 5, 11):
            resumed.position.assign(epoch=0, index=8 * stop)
            rest = [b["a"].tolist() for b in resumed.as_numpy_iterator()]
            self.assertEqual(rest, whole[stop:])

    @parameterized.parameters("csv", "jsonl")
    @pytest.mark.crossing(every=2)
    def test_a_file_may_be_larger_than_the_memory(self, kind):
        rows, text = 70_000, b"x" * 2000
        small, large = (f"{self.path}-{n}.{kind}" for n in ("small", "large"))
        row = b'%d,"%s"\n' if kind == "csv" else b'{"a": %d, "b": "%s"}\n'
        for path, count in ((small, 2000), (large, rows)):
            with open(path, "wb") as file:
                file.write(b"a,b\n" if kind == "csv" else b"")
                for number in range(count):
                    file.write(row % (number, text))
        done = forked_python.run(["-c", _LARGE, small, large], REPOSITORY)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        _, total, taken = done.stdout.split()
        self.assertEqual(int(total), rows * (rows - 1) // 2)
        self.assertLess(int(taken), os.path.getsize(large) / 2)


if __name__ == "__main__":
    absltest.main()
