"""Both ends know when the other one is gone, and who never came."""

import contextlib
import errno
import socket
import threading
import time
from unittest import mock

from absl.testing import absltest

from tfscale.cluster.liveness.presence import Presence
from tfscale.cluster.liveness.presence import Roster


def _free_address():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return f"localhost:{one.getsockname()[1]}"


def _meet(servers):
    """A roster, and the presences of its servers."""
    coordinator = _free_address()
    roster, presences = Roster(coordinator), {}

    def arrive(server):
        presences[server] = Presence(server, coordinator, 10.0)

    threads = [threading.Thread(target=arrive, args=(s,)) for s in servers]
    for thread in threads:
        thread.start()
    roster.wait_for(servers, 10.0)
    for thread in threads:
        thread.join()
    return coordinator, roster, presences


def end_all(roster):
    """As a coordinator does: it says so, and its connections close."""
    roster.end()
    for connection in roster.connections.values():
        with contextlib.suppress(OSError):  # One may be closed already.
            connection.shutdown(socket.SHUT_RDWR)


def _call_as_tensorflow(test, coordinator):
    """Has four callers of another kind at a port until the test ends."""
    over = threading.Event()
    test.addCleanup(over.set)
    host, port = coordinator.split(":")

    def call():
        while not over.wait(0.001):
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, int(port))) as one,
            ):
                one.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00")
                one.settimeout(5.0)
                one.recv(64)

    for _ in range(4):
        threading.Thread(target=call, daemon=True).start()


class PresenceTest(absltest.TestCase):
    def test_servers_are_told_of_the_end(self):
        _, roster, presences = _meet(["a:1", "b:1"])
        lost = []
        roster.watch(lambda *what: lost.append(what))
        end_all(roster)
        for presence in presences.values():
            presence.wait_for_end()
        self.assertEmpty(lost)

    def test_the_last_one_is_heard_though_tensorflow_calls_as_well(self):
        # Those that were greeted go on: their TensorFlow calls the same port,
        # again and again. Two seconds for each call, and the last server, which
        # waits as long, was never heard.
        coordinator = _free_address()
        _call_as_tensorflow(self, coordinator)
        presences = []

        def arrive():
            time.sleep(0.5)
            presences.append(Presence("a:1", coordinator, 10.0))

        thread = threading.Thread(target=arrive)
        thread.start()
        roster, start = Roster(coordinator), time.monotonic()
        roster.wait_for(["a:1"], 10.0)
        self.assertLess(time.monotonic() - start, 5.0)
        thread.join()
        roster.watch(lambda *_: None)
        end_all(roster)
        presences[0].wait_for_end()

    def test_calls_of_others_do_not_put_off_the_end_of_waiting(self):
        coordinator = _free_address()
        _call_as_tensorflow(self, coordinator)
        start = time.monotonic()
        with self.assertRaisesRegex(ConnectionError, "none from a:1"):
            Roster(coordinator).wait_for(["a:1"], 1.0)
        self.assertLess(time.monotonic() - start, 5.0)

    def test_a_server_that_ends_is_named_at_once(self):
        _, roster, presences = _meet(["a:1", "b:1"])
        lost, is_lost = [], threading.Event()

        def on_lost(*what):
            lost.append(what)
            is_lost.set()

        roster.watch(on_lost)
        presences["b:1"].connection.close()
        self.assertTrue(is_lost.wait(10.0))
        self.assertEqual(lost, [("b:1", True)])
        end_all(roster)
        presences["a:1"].wait_for_end()

    def test_a_coordinator_that_ends_without_a_word_is_an_error(self):
        coordinator, roster, presences = _meet(["a:1"])
        for connection in roster.connections.values():
            connection.close()
        with self.assertRaisesRegex(
            ConnectionError, f"{coordinator} is gone, and had not ended"
        ):
            presences["a:1"].wait_for_end()

    def test_a_machine_that_is_gone_is_noticed_in_time(self):
        # The kernel asks; what it is told to do is all that can be seen here.
        _, roster, presences = _meet(["a:1"])

        def seconds(connection):
            idle, between, tries = (
                connection.getsockopt(socket.IPPROTO_TCP, option)
                for option in (
                    socket.TCP_KEEPIDLE,
                    socket.TCP_KEEPINTVL,
                    socket.TCP_KEEPCNT,
                )
            )
            return idle + tries * between

        for end in (presences["a:1"].connection, roster.connections["a:1"]):
            self.assertTrue(
                end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            )
            self.assertBetween(seconds(end), 5, 14)
        roster.watch(print)
        end_all(roster)
        presences["a:1"].wait_for_end()

    def test_a_machine_that_is_gone_is_no_process_that_ended(self):
        # TensorFlow hears of the first two, of the others not in time.
        for error, answers in (
            (ConnectionResetError(), True),
            (BrokenPipeError(), True),
            (TimeoutError(errno.ETIMEDOUT, "timed out"), False),
            (OSError(errno.EHOSTUNREACH, "no route"), False),
        ):
            roster, lost = Roster("a:1"), []
            connection = mock.MagicMock(**{"recv.side_effect": error})
            roster.connections["b:1"] = connection
            is_lost = threading.Event()

            def on_lost(*what, lost=lost, is_lost=is_lost):
                lost.append(what)
                is_lost.set()

            roster.watch(on_lost)
            self.assertTrue(is_lost.wait(10.0))
            self.assertEqual(lost, [("b:1", answers)])

    def test_who_never_came_is_named(self):
        start = time.monotonic()
        with self.assertRaisesRegex(ConnectionError, "none from b:1"):
            Roster(_free_address()).wait_for(["b:1"], 0.3)
        with self.assertRaisesRegex(ConnectionError, "no answer from"):
            Presence("b:1", _free_address(), 0.3)
        self.assertLess(time.monotonic() - start, 5.0)

    def test_strangers_are_not_counted(self):
        address = _free_address()
        roster = Roster(address)
        thread = threading.Thread(target=roster.wait_for, args=(["a:1"], 10.0))
        thread.start()
        host, _, port = address.rpartition(":")
        while True:
            try:
                stranger = socket.create_connection((host, int(port)))
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        with stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n")
            self.assertEqual(stranger.recv(10), b"")
        presence = Presence("a:1", address, 10.0)
        thread.join()
        roster.watch(print)
        end_all(roster)
        presence.wait_for_end()

    def test_one_that_has_waited_too_long_is_met_when_it_calls_again(self):
        # The busy coordinator finds its first call in the queue, and once
        # counted it, and waited for nobody any more.
        address = _free_address()
        roster = Roster(address)
        thread = threading.Thread(target=roster.wait_for, args=(["a:1"], 10.0))
        host, _, port = address.rpartition(":")
        create_server = socket.create_server

        def with_a_late_call(*args, **kwargs):
            listener = create_server(*args, **kwargs)
            with socket.create_connection((host, int(port))) as late:
                late.sendall(b"here a:1\n")
            return listener

        with mock.patch.object(socket, "create_server", with_a_late_call):
            thread.start()
            presence = Presence("a:1", address, 10.0)
            thread.join()
        roster.watch(print)
        end_all(roster)
        presence.wait_for_end()


if __name__ == "__main__":
    absltest.main()
