"""A port says who is there, who never came, and when a chief has ended."""

import socket
import threading
from unittest import mock

from absl.testing import absltest

from tfscale.cluster.liveness import ports


def _listener():
    listener = socket.create_server(("localhost", 0))
    return listener, f"localhost:{listener.getsockname()[1]}"


@mock.patch.object(ports, "_SECONDS_BETWEEN_LOOKS", 0.01)
class PortsTest(absltest.TestCase):
    def test_a_chief_has_ended_when_its_port_is_closed(self):
        listener, address = _listener()
        chief = ports.ChiefPort(address, 1.0)
        ended = threading.Event()

        def wait():
            chief.wait_for_end()
            ended.set()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        self.assertFalse(ended.wait(0.1))
        listener.close()
        self.assertTrue(ended.wait(10.0))
        thread.join()

    def test_a_port_is_waited_for_until_who_was_killed_is_gone(self):
        # A worker that was started again at once could not serve, of which
        # TensorFlow said "Could not start gRPC server".
        listener, address = _listener()
        with self.assertRaisesRegex(OSError, f"{address}.*cannot be had"):
            ports.listen(address)
        threading.Timer(0.1, listener.close).start()
        ports.listen(address, 10.0).close()

    def test_a_chief_that_never_comes_is_an_error(self):
        listener, address = _listener()
        listener.close()
        with (
            mock.patch.object(ports, "_SECONDS_WITHOUT_WORDS", 0.02),
            self.assertLogs(level="WARNING") as said,
            self.assertRaisesRegex(
                ConnectionError, f"must have a chief. Received: no .* {address}"
            ),
        ):
            ports.ChiefPort(address, 0.1)
        # For up to 600 s it had said nothing.
        (line,) = said.output
        self.assertIn(f"Waiting for the chief at {address}.", line)

    def test_a_machine_that_falls_silent_is_an_error_in_time(self):
        # Its port is not closed, so it may come back, but not for ever.
        listener, address = _listener()
        chief = ports.ChiefPort(address, 1.0)
        listener.close()
        with (
            mock.patch.object(ports, "connect", side_effect=TimeoutError),
            mock.patch.object(ports, "_SECONDS_OF_SILENCE", 0.1),
            self.assertRaisesRegex(ConnectionError, "nothing from localhost"),
        ):
            chief.wait_for_end()

    def test_who_does_not_answer_is_named_with_the_reason(self):
        listener, there = _listener()
        gone, missing = _listener()
        gone.close()
        with listener:
            ports.wait_for_all([there], 10.0)
            with self.assertRaisesRegex(
                ConnectionError,
                rf"missing: {missing} \(nothing listens at its port\)\.",
            ):
                ports.wait_for_all([there, missing], 0.2)


if __name__ == "__main__":
    absltest.main()
