"""A port is waited for, and named if it is in use."""

import socket
import threading

from absl.testing import absltest

from tfscale.cluster import ports


def _listener():
    listener = socket.create_server(("localhost", 0))
    return listener, f"localhost:{listener.getsockname()[1]}"


class PortsTest(absltest.TestCase):
    def test_a_port_is_waited_for_until_who_was_killed_is_gone(self):
        # A worker that was started again at once could not serve, of which
        # TensorFlow said "Could not start gRPC server".
        listener, address = _listener()
        with self.assertRaisesRegex(OSError, f"{address}.*is in use"):
            ports.listen(address)
        threading.Timer(0.1, listener.close).start()
        ports.listen(address, 10.0).close()


if __name__ == "__main__":
    absltest.main()
