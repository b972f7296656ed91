"""The index of TFRecord files: found by headers, side by side, and kept."""

import concurrent.futures
import os
import threading
import time
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from tfscale import data
from tfscale.data.sources import index_files
from tfscale.data.sources import tfrecord_index

_GIB = 1 << 30


def _write(path, records):
    with tf.io.TFRecordWriter(path) as writer:
        for record in records:
            writer.write(record)
    return path


def _sparse(folder, size, record):
    """A file of records of zeros that takes no room on the disk."""
    one = _write(os.path.join(folder, "one"), [bytes(record)])
    with open(one, "rb") as file:
        header = file.read(12)
    path = os.path.join(folder, "sparse.tfrecord")
    count = size // (record + 16)
    with open(path, "wb") as file:
        for number in range(count):
            file.seek(number * (record + 16))
            file.write(header)
        file.truncate(count * (record + 16))
    return path, count


class BlocksTest(absltest.TestCase):
    def test_the_last_record_of_a_block_begins_within_128_kib_or_2_mib(self):
        path = os.path.join(self.create_tempdir().full_path, "a")
        for record, counts in ((1000, [130, 130, 40]), (200_000, [11, 11, 8])):
            _write(path, [bytes(record)] * sum(counts))
            blocks = data.tfrecords(path).blocks
            self.assertEqual(blocks[:, 0].tolist(), counts)
            self.assertEqual(blocks[:, 1].sum(), os.path.getsize(path))


class ScanTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.create_tempdir().full_path

    def test_ten_gibibytes_of_large_records(self):
        # Once a chunk was read around each header: most of the file.
        path, count = _sparse(self.folder, 10 * _GIB, 1_000_000)
        begin = time.process_time()
        index = tfrecord_index.scan(path)
        self.assertLess(time.process_time() - begin, 2.0)
        self.assertLen(index.offsets, count)
        self.assertIsNone(index.damage)
        self.assertEqual(set(index.sizes.tolist()), {1_000_016})

    def test_through_gfile_it_is_the_same(self):
        random = np.random.default_rng(0)
        sizes = random.integers(0, 3000, size=500)
        sizes[100:110] = 9 << 20  # more than a chunk, and than two
        records = [bytes(int(size)) for size in sizes]
        local = _write(os.path.join(self.folder, "a.tfrecord"), records)
        remote = _write("ram://scan/a.tfrecord", records)
        one, other = map(tfrecord_index.scan, (local, remote))
        self.assertEqual(one.sizes.tolist(), (sizes + 16).tolist())
        self.assertEqual(one.offsets.tolist(), other.offsets.tolist())
        self.assertEqual(one.sizes.tolist(), other.sizes.tolist())
        self.assertIsNone(other.damage)

    def test_headers_far_apart_are_read_one_by_one_and_checked(self):
        # More than the few by which it is seen that they are far apart.
        sizes = np.random.default_rng(0).integers(70_000, 90_000, size=80)
        records = [bytes(int(size)) for size in sizes]
        path = _write(os.path.join(self.folder, "a.tfrecord"), records)
        index = tfrecord_index.scan(path)
        self.assertEqual(index.sizes.tolist(), (sizes + 16).tolist())
        self.assertIsNone(index.damage)
        with open(path, "r+b") as file:
            file.seek(index.offsets[75] + 9)  # in the length's checksum
            file.write(b"\x00\x00")
        damaged = tfrecord_index.scan(path)
        self.assertEqual(damaged.sizes.tolist(), (sizes[:75] + 16).tolist())
        self.assertEqual(damaged.damage[0], index.offsets[75])
        os.truncate(path, int(index.offsets[70]) + 5)
        cut = tfrecord_index.scan(path)
        self.assertLen(cut.offsets, 70)
        self.assertRegex(cut.damage[1], "ends within")

    def test_a_file_that_waits_for_its_disk_does_not_hold_up_the_others(self):
        slow, _ = _sparse(self.folder, _GIB, 10_000_000)
        quick = _write(os.path.join(self.folder, "quick"), [bytes(70_000)] * 80)
        pread, waits, may_go_on = os.pread, threading.Event(), threading.Event()
        number = os.stat(slow).st_ino
        count = 0

        def late(file, *args):
            nonlocal count
            if os.fstat(file).st_ino == number:
                count += 1
                time.sleep(1e-3)
                if count > 2:
                    waits.set()
                    may_go_on.wait(60)
            return pread(file, *args)

        with (
            mock.patch.object(os, "pread", late),
            concurrent.futures.ThreadPoolExecutor(1) as pool,
        ):
            scanned = pool.submit(tfrecord_index.scan, slow)
            waits.wait(60)
            self.assertLen(tfrecord_index.scan(quick).offsets, 80)
            self.assertFalse(scanned.done())
            may_go_on.set()
            self.assertLen(scanned.result().offsets, 107)

    def test_damage_is_the_same_through_gfile(self):
        whole = _write(os.path.join(self.folder, "a"), [b"record"] * 9)
        with open(whole, "rb") as file:
            contents = file.read()
        cuts = [contents[:n] for n in (0, 5, 22, 25, 60, len(contents) - 1)]
        bits = [bytearray(contents) for _ in range(3)]
        for at, damaged in zip((0, 3 * 22 + 7, 8 * 22), bits, strict=True):
            damaged[at] ^= 4
        for number, damaged in enumerate([*cuts, *bits]):
            found = []
            for path in (
                os.path.join(self.folder, f"{number}"),
                f"ram://damage/{number}",
            ):
                with tf.io.gfile.GFile(path, "wb") as file:
                    file.write(bytes(damaged))
                index = tfrecord_index.scan(path)
                found.append((index.offsets.tolist(), index.damage))
            self.assertEqual(*found)
            records, damage = found[0]
            self.assertEqual(damage is None, len(damaged) in (0, 22))
            if damage:
                self.assertEqual(damage[0], 22 * len(records))


class IndexFilesTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.create_tempdir().full_path
        self.paths = [
            _write(
                os.path.join(self.folder, f"{n}.tfrecord"), [b"x" * n] * (n + 1)
            )
            for n in range(6)
        ]
        self.kept = os.path.join(self.folder, "kept")

    def _records(self, **kwargs):
        source = data.tfrecords(self.folder + "/*.tfrecord", **kwargs)
        return source.num_records

    def test_a_kept_index_is_used(self):
        self.assertEqual(self._records(index_dir=self.kept), 21)
        self.assertLen(os.listdir(self.kept), 6)
        with mock.patch.object(tfrecord_index, "scan", side_effect=OSError):
            self.assertEqual(self._records(index_dir=self.kept), 21)

    def test_a_file_of_another_size_or_time_is_read_again(self):
        self._records(index_dir=self.kept)
        _write(self.paths[0], [b""] * 3)
        self.assertEqual(self._records(index_dir=self.kept), 23)
        # As many bytes as before, in other records, later.
        size = os.path.getsize(self.paths[5])
        _write(self.paths[5], [bytes(size - 16)])
        self.assertEqual(os.path.getsize(self.paths[5]), size)
        os.utime(self.paths[5], ns=(1, 1))
        self.assertEqual(self._records(index_dir=self.kept), 18)

    def test_an_index_that_is_not_whole_is_made_anew(self):
        self._records(index_dir=self.kept)
        for name in os.listdir(self.kept):
            os.truncate(os.path.join(self.kept, name), 99)
        self.assertEqual(self._records(index_dir=self.kept), 21)
        with mock.patch.object(tfrecord_index, "scan", side_effect=OSError):
            self.assertEqual(self._records(index_dir=self.kept), 21)

    def test_a_remote_directory_keeps_it_as_well(self):
        self._records(index_dir="ram://kept")
        self.assertLen(tf.io.gfile.listdir("ram://kept"), 6)

    def test_files_that_answer_late_are_read_side_by_side(self):
        # A thousand files that take 20 ms each, as on a server.
        def scan(path):
            time.sleep(0.02)
            empty = np.zeros([0], np.int64)
            return tfrecord_index.FileIndex(path, empty, empty, None)

        paths = [f"{n}" for n in range(1000)]
        begin = time.monotonic()
        found = index_files.index_files(paths, scan, None)
        self.assertLess(time.monotonic() - begin, 10)  # one by one: 20 s
        self.assertEqual([index.path for index in found], paths)

    def test_workers_with_one_directory_share_the_work(self):
        # In one order each would read what the others are reading.
        paths = [os.path.join(self.folder, f"many-{n}") for n in range(400)]
        for path in paths:
            _write(path, [b"x"])
        scanned = []

        def scan(path):
            scanned.append(path)
            time.sleep(0.005)
            return tfrecord_index.scan(path)

        def worker(_):
            found = index_files.index_files(paths, scan, self.kept)
            return [(index.path, len(index.offsets)) for index in found]

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            one, other = pool.map(worker, range(2))
        self.assertEqual(one, [(path, 1) for path in paths])
        self.assertEqual(one, other)
        self.assertCountEqual(set(scanned), paths)
        self.assertLess(len(scanned), 1.75 * len(paths))

    def test_one_file_that_cannot_be_read_ends_it(self):
        def scan(path):
            raise OSError(path)

        with self.assertRaisesRegex(OSError, "7"):
            index_files.index_files(["7"], scan, None)


if __name__ == "__main__":
    absltest.main()
