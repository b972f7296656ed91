"""What of the costs of backups can be known without a clock."""

import json

from absl.testing import absltest

from benchmarks.backup import worker
from tests import forked_python
from tests.source_files import REPOSITORY


def measured(what, **config):
    """What a process of its own measures, as the benchmark has it."""
    arguments = json.dumps({"what": what, **config})
    done = forked_python.run(
        ["-m", "benchmarks.backup.worker", arguments], REPOSITORY
    )
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


class CostsTest(absltest.TestCase):
    def test_the_place_in_shuffled_data_is_a_few_integers(self):
        found = worker.position(records=100_000)
        self.assertLess(found["bytes"], 200)

    def test_a_sharded_state_is_whole_in_no_save_and_no_load(self):
        """`tf.train.Checkpoint` needs as much again as the whole state."""
        found = measured("memory", width=2048, layers=2)
        limit = found["largest_part"] + (32 << 20)
        self.assertGreater(found["state"], 2 * limit)
        self.assertLess(found["save"], limit)
        self.assertLess(found["load"], limit)


if __name__ == "__main__":
    absltest.main()
