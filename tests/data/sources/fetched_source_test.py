"""ArrayRecord: bad input. The rest is in the contract."""

import os

import numpy as np
import tensorflow as tf
from absl.testing import absltest
from array_record.python import array_record_module

from tfscale import data


def _write(path, records):
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


class ArrayRecordTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        random = np.random.default_rng(0)
        self.records = [random.bytes(3000) for _ in range(20)]
        folder = self.create_tempdir().full_path
        self.path = _write(os.path.join(folder, "a"), self.records)

    def _damaged(self):
        with open(self.path, "r+b") as file:
            contents = file.read()
            at = contents.index(self.records[7][:64])
            file.seek(at + 40)
            file.write(b"damage")

    def test_damage_is_named(self):
        self._damaged()
        pipeline = data.pipeline(
            data.array_records(self.path), batch_size=5, cache="none"
        )
        with self.assertRaisesRegex(tf.errors.OpError, self.path):
            list(pipeline)

    def test_damage_is_left_out_and_counted(self):
        self._damaged()
        with self.assertWarnsRegex(UserWarning, "1 damaged records of 1"):
            source = data.array_records(self.path, on_damage="skip")
        pipeline = data.pipeline(source, batch_size=19, shuffle=False)
        (batch,) = pipeline.as_numpy_iterator()
        self.assertEqual(batch.tolist(), self.records[:7] + self.records[8:])

    def test_a_file_of_another_kind_is_named(self):
        with open(self.path, "wb") as file:
            file.write(b"not an ArrayRecord file")
        with self.assertRaisesRegex(tf.errors.DataLossError, self.path):
            data.array_records(self.path)


if __name__ == "__main__":
    absltest.main()
