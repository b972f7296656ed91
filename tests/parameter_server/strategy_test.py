"""What a strategy over parameter servers says of its cluster."""

from unittest import mock

from absl.testing import absltest

import tfscale
from tfscale.cluster import Cluster
from tfscale.parameter_server import strategy


class StrategyTest(absltest.TestCase):
    @mock.patch.object(strategy, "_SECONDS_FOR_THE_OTHERS", 0.1)
    def test_who_is_not_there_is_named(self):
        # Without `tfscale.initialize` before it TensorFlow waited for ever,
        # without a word.
        jobs = {
            "chief": ("localhost:3",),
            "worker": ("localhost:1",),
            "ps": ("localhost:2",),
        }
        with self.assertRaisesRegex(
            ConnectionError,
            "workers and parameter servers must be there. Received: .*missing: "
            "localhost:1 .nothing listens at its port.; localhost:2 ",
        ):
            tfscale.ParameterServerStrategy(Cluster(jobs, "chief", 0))


if __name__ == "__main__":
    absltest.main()
