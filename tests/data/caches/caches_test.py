"""What goes wrong with caches, and what the error says."""

import errno
import fcntl
import os
import shutil
import socket
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import forked_python
from tests.data import record_files
from tests.source_files import REPOSITORY
from tfscale import data
from tfscale.data.caches import component_files


def _other_rows(path):
    """300 rows, of which one depends on the path."""
    rows = np.arange(300)
    rows[155] = 1000 if path.endswith("two") else 155
    return rows


def _other_files(path):
    """300 files that hold the same, and a shard; one of them is another."""
    os.makedirs(path)
    for row in _other_rows(path):
        tf.io.write_file(os.path.join(path, f"{row:04}"), "same")
    shard = path + ".tfrecord"
    with tf.io.TFRecordWriter(shard) as writer:
        for row in _other_rows(path):
            writer.write(str(row).encode())
    return os.path.join(path, "*"), shard


def _other_lines(path):
    """A file of one size and first line, whatever the path."""
    lines = "x\n1\n2\n" if path.endswith("two") else "x\n1\n3\n"
    tf.io.write_file(path + ".csv", lines)
    return path + ".csv"


def _with_budget(num_bytes):
    options = tf.data.Options()
    if num_bytes is not None:
        options.autotune.ram_budget = num_bytes
    return options


class CacheTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = os.path.join(self.create_tempdir(), "cache")

    def _pipeline(self, ram_budget=None, **kwargs):
        return data.pipeline(
            data.arrays(np.arange(10)),
            options=_with_budget(ram_budget),
            parse=kwargs.pop("parse", lambda x: tf.fill([100], x)),
            batch_size=5,
            **kwargs,
        )

    def _file(self, **kwargs):
        return self._pipeline(cache="file", cache_dir=self.folder, **kwargs)

    def test_auto_is_memory_then_file_then_none(self):
        choose = {"cache_dir": self.folder}
        self.assertEqual(self._pipeline(**choose).recipe.cache_kind, "memory")
        tight = self._pipeline(ram_budget=4000, **choose)
        self.assertEqual(tight.recipe.cache_kind, "file")
        none = self._pipeline(ram_budget=4000)
        self.assertEqual(none.recipe.cache_kind, "none")
        full = mock.Mock(return_value=mock.Mock(free=100))
        with mock.patch.object(shutil, "disk_usage", full):
            none = self._pipeline(ram_budget=4000, **choose)
        self.assertEqual(none.recipe.cache_kind, "none")

    def test_memory_that_does_not_fit_is_refused(self):
        with self.assertRaisesRegex(ValueError, "memory budget"):
            self._pipeline(cache="memory", ram_budget=4000)

    @parameterized.parameters("none", False, None)
    def test_none_is_asked_for_in_any_of_these_words(self, cache):
        self.assertEqual(self._pipeline(cache=cache).recipe.cache_kind, "none")

    def test_a_window_that_does_not_fit_is_refused(self):
        path = record_files.shard(self.create_tempdir().full_path)
        with self.assertRaisesRegex(ValueError, "shuffle=10 .*Use 9 or"):
            data.pipeline(
                data.tfrecords(path),
                batch_size=2,
                shuffle=10,
                options=_with_budget(1000),
                cache="none",
            )

    def test_a_window_fits_the_memory_in_any_order(self):
        # In the files' order it was 512 records, however large they are.
        path = record_files.shard(self.create_tempdir().full_path, count=600)
        for shuffle in (True, False):
            pipeline = data.pipeline(
                data.tfrecords(path),
                batch_size=2,
                shuffle=shuffle,
                options=_with_budget(10_000),
                cache="none",
            )
            self.assertEqual(pipeline.recipe.window, 95)

    def test_a_disk_that_is_too_small_is_named_and_left_clean(self):
        full = mock.Mock(return_value=mock.Mock(free=100))
        with (
            mock.patch.object(shutil, "disk_usage", full),
            self.assertRaisesRegex(OSError, f"{self.folder}.*100 bytes free"),
        ):
            self._file()
        self.assertEmpty(os.listdir(self.folder))

    def test_a_disk_that_fills_up_is_named_and_left_clean(self):
        error = tf.errors.ResourceExhaustedError(None, None, "No space left")
        with (
            mock.patch.object(component_files, "_write_all", side_effect=error),
            self.assertRaisesRegex(OSError, "must fit on its disk"),
        ):
            self._strings()
        self.assertEmpty(os.listdir(self.folder))
        self.assertLen(list(self._strings()), 2)  # no stale lock

    @pytest.mark.crossing
    def test_a_write_that_really_fails_is_named_and_left_clean(self):
        # The system refuses to let a file grow, as a full disk does.
        code = (
            "import os, resource, sys\n"
            "import numpy as np, tensorflow as tf\n"
            "from tfscale import data\n"
            "def run():\n"
            "    return data.pipeline(data.arrays(np.arange(10)),\n"
            "        parse=lambda x: tf.fill([100], x), batch_size=5,\n"
            "        cache='file', cache_dir=sys.argv[1])\n"
            "_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))\n"
            "try:\n"
            "    run()\n"
            "except OSError as error:\n"
            "    print(error)\n"
            "print(os.listdir(sys.argv[1]))\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
            "print(len(list(run())))\n"
        )
        done = forked_python.run(["-c", code, self.folder], REPOSITORY)
        self.assertEqual(done.returncode, 0, done.stderr)
        error, left, batches = done.stdout.splitlines()
        self.assertIn("must fit on its disk", error)
        self.assertIn(self.folder, error)
        self.assertEqual((left, batches), ("[]", "2"))

    def test_a_cache_is_used_by_later_runs(self):
        self._file()

        def parse(number):
            values = tf.fill([100], number)
            # Some are made again and compared: not the fifth of ten records.
            check = tf.debugging.Assert(number != 4, ["parsed again"])
            with tf.control_dependencies([check]):
                return tf.identity(values)

        self.assertLen(list(self._file(parse=parse)), 2)

    @pytest.mark.crossing
    def test_a_cache_of_a_table(self):
        # TensorFlow injected a prefetch into it: "Expected only one fetch".
        path = self.create_tempdir().full_path + "/a.csv"
        tf.io.write_file(path, "x\n1\n2\n")
        source = data.csv(path, dtypes={"x": "int32"})
        for _ in range(2):
            pipeline = data.pipeline(
                source,
                batch_size=2,
                shuffle=False,
                parse=lambda row: row["x"] + 1,
                cache="file",
                cache_dir=self.folder,
            )
            self.assertAllEqual(list(pipeline), [[2, 3]])

    def test_records_with_nan_are_those_of_the_cache(self):
        # NaN differs from itself: such a cache was refused once written.
        def parse(x):
            return tf.where(x == 3, np.nan, tf.cast(x, tf.float32))

        for _ in range(2):
            found = self._file(parse=parse, shuffle=False)
            self.assertAllEqual(
                np.concatenate(list(found.as_numpy_iterator())),
                [0, 1, 2, np.nan, *range(4, 10)],
            )

    def test_a_cache_of_another_parse_is_refused(self):
        self._file()
        with self.assertRaisesRegex(ValueError, "have changed.*Delete"):
            self._file(parse=lambda x: tf.fill([100], x + 1))

    def test_a_parse_that_differs_in_later_records_is_refused(self):
        # Once the first record alone was compared: here it is all zeros.
        self._file()
        with self.assertRaisesRegex(ValueError, "record 1 differs"):
            self._file(parse=lambda x: tf.fill([100], 2 * x))

    @parameterized.named_parameters(
        ("arrays", lambda path: data.arrays(_other_rows(path))),
        ("files", lambda path: data.files(_other_files(path))),
        ("tfrecords", lambda path: data.tfrecords(_other_files(path)[1])),
        (
            "csv",
            lambda path: data.csv(_other_lines(path), dtypes={"x": "int64"}),
        ),
        ("tokens", lambda path: data.tokens(_other_rows(path), 1)),
    )
    @pytest.mark.crossing
    def test_other_data_of_the_same_shape_has_a_cache_of_its_own(self, make):
        # Hundreds of records, so that no sample of them tells.
        folder = self.create_tempdir().full_path
        seen = []
        for which in ("one", "two"):
            path = os.path.join(folder, which)
            pipeline = data.pipeline(
                make(path),
                parse=lambda *record: tf.nest.flatten(record)[0],
                batch_size=10**6,
                shuffle=False,
                cache="file",
                cache_dir=self.folder,
            )
            seen.append(next(pipeline.as_numpy_iterator()).tolist())
        self.assertNotEqual(*seen)
        self.assertLen(os.listdir(self.folder), 2)

    def _strings(self):
        return self._file(parse=lambda x: tf.fill([9], tf.strings.as_string(x)))

    def _several(self):
        def parse(x):
            return {"a": x, "b": tf.strings.as_string(x), "c": tf.fill([9], x)}

        return self._file(parse=parse)

    @parameterized.product(
        kind=("_file", "_strings", "_several"), file=("0.bin", "sums.bin")
    )
    @pytest.mark.crossing(every=3)
    def test_a_damaged_record_of_a_cache_is_no_record(self, kind, file):
        # Once the error did not say which file it was.
        make = getattr(self, kind)
        make()
        (name,) = os.listdir(self.folder)
        path = os.path.join(self.folder, name, file)
        record_files.damage(
            path, os.path.getsize(path) * 9 // 20
        )  # in the fifth record
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError,
            rf"damaged.*{name}.*\[4\]?\].*Delete",
        ):
            list(make())

    @parameterized.parameters(
        ("_file", "0.bin"),
        ("_file", "sums.bin"),
        ("_file", "about.json"),
        ("_strings", "0.bin"),
        ("_strings", "0.begin.bin"),
    )
    @pytest.mark.crossing(every=5)
    def test_a_cache_that_is_not_whole_is_named(self, kind, file):
        make = getattr(self, kind)
        make()
        (name,) = os.listdir(self.folder)
        path = os.path.join(self.folder, name, file)
        os.truncate(path, os.path.getsize(path) // 2)
        with self.assertRaisesRegex(ValueError, f"whole.*{name}.*Delete"):
            make()
        os.remove(path)
        with self.assertRaisesRegex(ValueError, f"whole.*{name}.*Delete"):
            make()

    def test_a_remote_cache_is_refused(self):
        with self.assertRaisesRegex(ValueError, "`cache_dir`.*ram://cache"):
            self._pipeline(cache="file", cache_dir="ram://cache")

    def test_what_fails_while_a_cache_is_written_is_not_the_disk(self):
        path = record_files.shard(self.create_tempdir().full_path)
        record_files.damage(path, 3 * record_files.RECORD + 14)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, path):
            data.pipeline(
                data.tfrecords(path),
                batch_size=2,
                cache="file",
                cache_dir=self.folder,
            )
        self.assertEmpty(os.listdir(self.folder))

    def test_records_of_every_kind_are_kept(self):
        def parse(x):
            return {
                "number": tf.cast(x, tf.bfloat16),
                "is_odd": x % 2 == 1,
                "is_two": x == 2,
                "bytes": tf.repeat(b"\0", x % 3),
                "word": tf.strings.reduce_join(tf.fill([x % 3], "\0\xff")),
                "other": tf.strings.as_string(x),
                "nothing": tf.zeros([0, 3]),
                "image": tf.fill([2, 3], tf.cast(x, tf.uint8)),
            }

        kwargs = dict(parse=parse, shuffle=False, padding=0)
        plain = self._pipeline(cache="none", **kwargs)
        for _ in range(2):
            kept = self._file(**kwargs)
            for one, other in zip(plain, kept, strict=True):
                tf.nest.map_structure(self.assertAllEqual, one, other)

    def _run(self, then):
        code = (
            "import os, sys, signal, time\n"
            "import numpy as np, tensorflow as tf\n"
            "from tfscale import data\n"
            "from tfscale.data.caches import component_files\n"
            "def run():\n"
            "    numbers = data.arrays(np.arange(10))\n"
            "    return data.pipeline(numbers, batch_size=5,\n"
            "        parse=lambda x: tf.fill([9], tf.strings.as_string(x)),\n"
            "        cache='file', cache_dir=sys.argv[1])\n"
        )
        return ["-c", code + then, self.folder]

    def test_a_killed_run_leaves_nothing_in_the_way(self):
        done = forked_python.run(
            self._run(
                "def killed(*_):\n"
                "    os.kill(os.getpid(), signal.SIGKILL)\n"
                "component_files._write_all = killed\n"
                "run()\n"
            ),
            REPOSITORY,
        )
        self.assertEqual(done.returncode, -9)
        self.assertLen(os.listdir(self.folder), 1)  # what it left
        self.assertLen(list(self._strings()), 2)
        names = os.listdir(self.folder)
        self.assertLen(names, 1)
        self.assertNotIn("partial", names[0])

    @pytest.mark.crossing
    def test_two_runs_at_a_time_write_one_cache(self):
        # Two containers had one name of the host and number of the process:
        # they wrote into one directory, and each removed the other's.
        write = component_files.write
        others = []

        def write_both(partial, *args):
            count = write(partial, *args)
            if not others:
                others.append(partial)
                self.assertLen(list(self._strings()), 2)  # the other's
                self.assertTrue(os.path.isdir(partial))
            return count

        with (
            mock.patch.object(component_files, "write", write_both),
            mock.patch.object(os, "getpid", lambda: 1),
            mock.patch.object(socket, "gethostname", lambda: "node"),
        ):
            self.assertLen(list(self._strings()), 2)
        self.assertLen(others, 1)
        self.assertLen(os.listdir(self.folder), 1)
        self.assertLen(list(self._strings()), 2)

    @pytest.mark.crossing
    def test_what_another_process_is_writing_is_left_alone(self):
        # Here it is one that is said to have ended: of another container.
        self._strings()
        (name,) = os.listdir(self.folder)
        partial = os.path.join(self.folder, f"{name}.partial-0")
        os.mkdir(partial)
        lock = os.open(partial, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self._strings()
        self.assertTrue(os.path.isdir(partial))
        os.close(lock)
        self._strings()
        self.assertFalse(os.path.isdir(partial))

    @pytest.mark.crossing
    def test_a_file_system_without_locks(self):
        refused = OSError(errno.ENOLCK, "No locks available")
        with mock.patch.object(fcntl, "flock", side_effect=refused):
            self.assertLen(list(self._strings()), 2)
            (name,) = os.listdir(self.folder)
            partial = os.path.join(self.folder, f"{name}.partial-0")
            os.mkdir(partial)
            self._strings()
        self.assertTrue(os.path.isdir(partial))


if __name__ == "__main__":
    tf.test.main()
