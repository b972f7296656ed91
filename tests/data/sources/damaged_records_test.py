"""Damaged records are named, or skipped and counted."""

import os

import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests.data import record_files
from tfscale import data


class DamageTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.create_tempdir().full_path

    def test_damaged_data_raises_with_file_and_offset(self):
        path = record_files.shard(self.folder)
        record_files.damage(path, 3 * record_files.RECORD + 14)
        pipeline = data.pipeline(data.tfrecords(path), batch_size=5)
        offset = 3 * record_files.RECORD
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError,
            rf"cannot be read.*{path}\] \[offset\] \[{offset}\]",
        ):
            list(pipeline)

    @parameterized.parameters(
        (4 * record_files.RECORD + 20, "ends within a record", 4),
        (4 * record_files.RECORD + 7, "ends within a record's header", 4),
    )
    def test_a_truncated_file_is_found_before_the_first_step(
        self, size, reason, whole
    ):
        path = record_files.shard(self.folder)
        os.truncate(path, size)
        with self.assertRaisesRegex(
            tf.errors.DataLossError,
            f"{reason}.*{path}, offset {whole * record_files.RECORD}",
        ):
            data.tfrecords(path)

    def test_a_damaged_length_is_found_before_the_first_step(self):
        path = record_files.shard(self.folder)
        record_files.damage(path, 2 * record_files.RECORD + 1)
        with self.assertRaisesRegex(
            tf.errors.DataLossError,
            f"length.*{path}, offset {2 * record_files.RECORD}",
        ):
            data.tfrecords(path)

    @parameterized.parameters([[3]], [[0]], [[9]], [[2, 3, 7]])
    @pytest.mark.crossing(every=4)
    def test_damaged_records_are_skipped_and_counted(self, damaged):
        path = record_files.shard(self.folder)
        for number in damaged:
            record_files.damage(path, number * record_files.RECORD + 14)
        with self.assertWarnsRegex(UserWarning, f"{len(damaged)} damaged"):
            source = data.tfrecords(path, on_damage="skip")
        self.assertEqual(source.num_skipped, len(damaged))
        good = [
            b"record %02d" % number
            for number in range(10)
            if number not in damaged
        ]
        pipeline = data.pipeline(source, batch_size=4)
        self.assertEqual(pipeline.cardinality(), -(-len(good) // 4))
        self.assertCountEqual(record_files.values(pipeline), good)

    def test_the_rest_of_a_truncated_file_is_skipped(self):
        path = record_files.shard(self.folder)
        os.truncate(path, 4 * record_files.RECORD + 20)
        with self.assertWarnsRegex(UserWarning, "1 damaged"):
            source = data.tfrecords(path, on_damage="skip")
        self.assertLen(
            record_files.values(data.pipeline(source, batch_size=4)), 4
        )

    def test_a_file_that_has_gone_is_named(self):
        path = record_files.shard(self.folder)
        pipeline = data.pipeline(data.tfrecords(path), batch_size=5)
        os.remove(path)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, path):
            list(pipeline)

    def test_a_truncated_gzip_file_is_named(self):
        path = os.path.join(self.folder, "a.gz")
        with tf.io.TFRecordWriter(path, "GZIP") as writer:
            for _ in range(100):
                writer.write(os.urandom(100))
        os.truncate(path, 5000)
        with self.assertRaisesRegex(tf.errors.DataLossError, path):
            data.tfrecords(path, compression="GZIP")

    @parameterized.product(
        written=("", "GZIP", "ZLIB"),
        read=("", "GZIP", "ZLIB"),
        on_damage=("raise", "skip"),
    )
    def test_another_compression_than_the_files(self, written, read, on_damage):
        path = os.path.join(self.folder, "a.tfrecord")
        with tf.io.TFRecordWriter(path, written) as writer:
            for _ in range(3):
                writer.write(os.urandom(100))
        arguments = dict(compression=read, on_damage=on_damage)
        if written == read:
            self.assertEqual(data.tfrecords(path, **arguments).num_records, 3)
            return
        with self.assertRaisesRegex(
            ValueError, f"{path}.*compression='{written}'"
        ):
            data.tfrecords(path, **arguments)

    def test_a_compression_that_there_is_not(self):
        with self.assertRaisesRegex(ValueError, "compression='zip'"):
            data.tfrecords(record_files.shard(self.folder), compression="zip")


if __name__ == "__main__":
    tf.test.main()
