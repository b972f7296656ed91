"""Parts written under one division are read under any other."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfscale.backup.parts import Part
from tfscale.backup.parts import read_part
from tfscale.backup.parts import write_parts
from tfscale.sharding.sharding import Sharding
from tfscale.sharding.shards import shard

WHOLE = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
SHARDINGS = {
    "whole": Sharding((8, 6), 4),
    "columns": Sharding((8, 6), 4, num_ranks=3, model_dim=1),
    "rows": Sharding((8, 6), 4, num_ranks=4, model_dim=0),
    "both": Sharding(
        (8, 6), 4, num_replicas=2, num_ranks=2, model_dim=1, data_dim=0
    ),
}


class PartsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(written=list(SHARDINGS), read=list(SHARDINGS))
    def test_any_division_reads_any_other(self, written, read):
        prefix = self.create_tempdir().full_path + "/parts"
        sharding = SHARDINGS[written]
        write_parts(
            prefix,
            [
                Part("v", sharding, place, shard(WHOLE, sharding, *place))
                for place in sharding.places
            ],
        )
        for place in SHARDINGS[read].places:
            self.assertAllEqual(
                read_part(prefix, "v", tf.float32, SHARDINGS[read], place),
                WHOLE[SHARDINGS[read].slices(*place)],
            )
        # And TensorFlow's own reader has the whole.
        reader = tf.train.load_checkpoint(prefix)
        self.assertAllEqual(reader.get_tensor("v"), WHOLE)


if __name__ == "__main__":
    tf.test.main()
