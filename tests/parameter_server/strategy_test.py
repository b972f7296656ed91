"""What a strategy over parameter servers says of its cluster."""

import contextlib
import socket
from unittest import mock

from absl.testing import absltest

import tfscale
from tests import forked_processes
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
            "processes of a cluster must be running. Received: .*missing: "
            "localhost:1 .nothing listens at its port.; localhost:2 ",
        ):
            tfscale.ParameterServerStrategy(Cluster(jobs, "chief", 0))

    def test_a_port_in_use_is_named(self):
        # TensorFlow: "Could not start gRPC server".
        with contextlib.ExitStack() as stack:
            chief, worker, server = (
                f"localhost:{found.getsockname()[1]}"
                for found in [
                    stack.enter_context(socket.create_server(("localhost", 0)))
                    for _ in range(3)
                ]
            )
            jobs = {"chief": (chief,), "worker": (worker,), "ps": (server,)}

            def make():
                with self.assertRaisesRegex(
                    OSError, f"Received: {chief}, and port"
                ):
                    tfscale.ParameterServerStrategy(Cluster(jobs, "chief", 0))

            status, said = forked_processes.output_of(make)
        self.assertEqual(status, 0, said)


if __name__ == "__main__":
    absltest.main()
