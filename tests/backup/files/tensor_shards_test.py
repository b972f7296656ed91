"""Parts written under one division are read under any other."""

import os
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfscale.backup.files import tensor_shards
from tfscale.backup.files.tensor_shards import TensorShard
from tfscale.backup.files.tensor_shards import read_shard
from tfscale.backup.files.tensor_shards import write_shards
from tfscale.variables.sharding import Sharding
from tfscale.variables.shards import shard

WHOLE = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
SHARDINGS = {
    "whole": Sharding((8, 6), 4),
    "columns": Sharding((8, 6), 4, num_ranks=3, model_dim=1),
    "rows": Sharding((8, 6), 4, num_ranks=4, model_dim=0),
    "both": Sharding(
        (8, 6), 4, num_replicas=2, num_ranks=2, model_dim=1, data_dim=0
    ),
}
# Bytes that were written, and how many parts were left.
CHUNKS = [(48, 5), (48, 2), (32, 0)]


class PartsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(written=list(SHARDINGS), read=list(SHARDINGS))
    def test_any_division_reads_any_other(self, written, read):
        prefix = self.create_tempdir().full_path + "/parts"
        sharding = SHARDINGS[written]
        write_shards(
            prefix,
            [
                TensorShard(
                    "v", sharding, place, shard(WHOLE, sharding, *place)
                )
                for place in sharding.coordinates
            ],
        )
        for place in SHARDINGS[read].coordinates:
            self.assertAllEqual(
                read_shard(prefix, "v", tf.float32, SHARDINGS[read], place),
                WHOLE[SHARDINGS[read].slices(*place)],
            )
        # And TensorFlow's own reader has the whole.
        reader = tf.train.load_checkpoint(prefix)
        self.assertAllEqual(reader.get_tensor("v"), WHOLE)

    def test_a_few_at_a_time_and_each_is_let_go_then(self):
        """All at once had a processor of the training for a whole step."""
        folder = self.create_tempdir().full_path
        whole = Sharding((4,), 4)
        left = [
            TensorShard(str(i), whole, (0, 0), tf.fill((4,), float(i)))
            for i in range(8)
        ]
        seen, write = [], tensor_shards._write

        def watched(prefix, shards, count):
            write(prefix, shards, count)
            seen.append((count * whole.local_bytes, len(shards)))

        with (
            mock.patch.object(tensor_shards, "_CHUNK", 33),
            mock.patch.object(tensor_shards, "_write", watched),
        ):
            write_shards(f"{folder}/parts", left)
        self.assertEqual(seen, CHUNKS)
        self.assertLen(os.listdir(folder), 4)  # with the index
        reader = tf.train.load_checkpoint(f"{folder}/parts")
        for i in range(8):
            self.assertAllEqual(reader.get_tensor(str(i)), [i] * 4)


if __name__ == "__main__":
    tf.test.main()
