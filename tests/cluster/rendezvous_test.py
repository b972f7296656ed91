"""Both ends know when the other one is gone, and who never came."""

import contextlib
import errno
import os
import socket
import threading
import time
from unittest import mock

from absl.testing import absltest

from tests import forked_processes
from tfscale.cluster import Cluster
from tfscale.cluster import rendezvous
from tfscale.cluster.rendezvous import Rendezvous

CHIEF = "chief:1"


def chief_of(servers, **options):
    """The chief's end of a cluster with servers; it calls them."""
    chief = _cluster(servers)
    return Rendezvous(chief, {}, called=servers, callers=(), **options)


def server_of(servers, index):
    """A server's end, which waits for the chief."""
    cluster = _cluster(servers, "ps", index)
    return Rendezvous(cluster, {}, called=(), callers=(CHIEF,))


def _cluster(servers, job="chief", index=0):
    return Cluster({"chief": (CHIEF,), "ps": tuple(servers)}, job, index)


def arrive(servers, index, presences):
    """Meets the chief, as a server."""
    one = server_of(servers, index)
    one.meet(10.0, first=CHIEF)
    one.tell("ready")
    presences[servers[index]] = one


def _meet(servers, on_lost=lambda *what: None, **options):
    """The chief's end, and those of its servers."""
    chief, presences = chief_of(servers), {}
    threads = [
        threading.Thread(target=arrive, args=(servers, index, presences))
        for index in range(len(servers))
    ]
    for thread in threads:
        thread.start()
    chief.meet(10.0, first=CHIEF)
    chief.listen(on_lost, **options)
    chief.wait_until_ready(10.0, "servers")
    for thread in threads:
        thread.join()
    return chief, presences


def end_all(roster, error=None):
    """As a chief does: it says so, and its connections close."""
    roster.end(error)
    close(roster)


def close(place):
    """As the kernel does with the connections of a process that ends."""
    for connection in place.connections.values():
        with contextlib.suppress(OSError):  # One may be closed already.
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


class RendezvousTest(absltest.TestCase):
    def test_servers_are_told_of_the_end(self):
        lost = []
        roster, presences = _meet(
            forked_processes.free_addresses(2), lambda *what: lost.append(what)
        )
        end_all(roster)
        for one in presences.values():
            one.wait_for_end()
        self.assertEmpty(lost)

    def test_a_server_that_ends_is_named_at_once(self):
        here, gone = forked_processes.free_addresses(2)
        lost, is_lost = [], threading.Event()

        def on_lost(*what):
            lost.append(what)
            is_lost.set()

        roster, presences = _meet([here, gone], on_lost)
        close(presences[gone])
        self.assertTrue(is_lost.wait(10.0))
        self.assertEqual(lost, [(gone, True)])
        # It might come back.
        with mock.patch.object(rendezvous, "_SECONDS_TO_COME_BACK", 0.5):
            end_all(roster)
        presences[here].wait_for_end()

    def test_a_chief_that_ends_without_a_word_is_an_error(self):
        (server,) = forked_processes.free_addresses(1)
        roster, presences = _meet([server])
        close(roster)
        with self.assertRaisesRegex(
            ConnectionError, f"{CHIEF} is gone, and had not ended"
        ):
            presences[server].wait_for_end()

    def test_a_machine_that_is_gone_is_noticed_in_time(self):
        # The kernel asks; what it is told to do is all that can be seen here.
        (server,) = forked_processes.free_addresses(1)
        roster, presences = _meet([server])

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

        for end in (
            presences[server].connections[CHIEF],
            roster.connections[server],
        ):
            self.assertTrue(
                end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            )
            self.assertBetween(seconds(end), 5, 14)
        end_all(roster)
        presences[server].wait_for_end()

    def test_a_machine_that_is_gone_is_no_process_that_ended(self):
        # TensorFlow hears of the first two, of the others not in time.
        for error, answers in (
            (ConnectionResetError(), True),
            (BrokenPipeError(), True),
            (TimeoutError(errno.ETIMEDOUT, "timed out"), False),
            (OSError(errno.EHOSTUNREACH, "no route"), False),
        ):
            roster, lost = chief_of(["b:1"]), []
            connection = mock.MagicMock(**{"makefile.side_effect": error})
            roster.connections["b:1"] = connection
            is_lost = threading.Event()

            def on_lost(*what, lost=lost, is_lost=is_lost):
                lost.append(what)
                is_lost.set()

            roster.listen(on_lost)
            self.assertTrue(is_lost.wait(10.0))
            self.assertEqual(lost, [("b:1", answers)])

    def test_who_never_came_is_named(self):
        missing, here = forked_processes.free_addresses(2)
        start = time.monotonic()
        with self.assertRaisesRegex(
            ConnectionError,
            rf"after 0.3 s, .*: {missing} \(nothing listens at its port",
        ):
            chief_of([missing]).meet(0.3, first=CHIEF)
        said = []
        with self.assertRaisesRegex(
            ConnectionError,
            rf"after 0.3 s, at {here}, .*: {CHIEF} \(it did not",
        ):
            server_of([here], 0).meet(
                0.3, patience=0.02, say=said.append, first=CHIEF
            )
        # For up to 600 s it had said nothing.
        (line,) = said
        self.assertIn(f"Waiting for {CHIEF}", line)
        self.assertLess(time.monotonic() - start, 5.0)

    def test_one_that_does_not_get_ready_is_named(self):
        (server,) = forked_processes.free_addresses(1)
        one, chief = server_of([server], 0), chief_of([server])
        thread = threading.Thread(target=lambda: one.meet(10.0, first=CHIEF))
        thread.start()
        chief.meet(10.0, first=CHIEF)
        thread.join()
        chief.listen(lambda *what: None)
        for closes, reason in ((False, "it is not ready"), (True, "lost")):
            if closes:
                close(one)
                time.sleep(0.2)
            with self.assertRaisesRegex(
                ConnectionError, rf"All servers .*: {server} \(.*{reason}"
            ):
                chief.wait_until_ready(0.2, "servers")

    def test_one_that_was_lost_is_called_again(self):
        (server,) = forked_processes.free_addresses(1)
        chief, presences = _meet([server], calls_again=True)
        close(presences[server])
        arrive([server], 0, presences)
        chief.wait_until_ready(10.0, "servers")
        end_all(chief)
        presences[server].wait_for_end()

    def test_a_chief_that_fails_says_so(self):
        (server,) = forked_processes.free_addresses(1)
        roster, presences = _meet([server])
        end_all(roster, ValueError("no\nfile"))
        with self.assertRaisesRegex(
            ConnectionError, f"{CHIEF} has failed with ValueError: no. See its"
        ):
            presences[server].wait_for_end()

    def test_a_chief_without_all_others_says_so_to_those_there(self):
        here, missing = servers = forked_processes.free_addresses(2)
        presences = {}
        thread = threading.Thread(target=arrive, args=(servers, 0, presences))
        thread.start()
        with self.assertRaises(ConnectionError):
            chief_of(servers).meet(1.5, first=CHIEF)
        thread.join()
        with self.assertRaisesRegex(
            ConnectionError, f"{CHIEF} has failed with .*missing: {missing}"
        ):
            presences[here].wait_for_end()

    def test_a_forked_child_does_not_keep_connections_open(self):
        (server,) = forked_processes.free_addresses(1)
        roster, presences = _meet([server])
        read, write = os.pipe()
        child = forked_processes.fork(lambda: os.read(read, 1))
        close(roster)
        with self.assertRaisesRegex(ConnectionError, "is gone"):
            presences[server].wait_for_end()
        os.write(write, b"x")
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


if __name__ == "__main__":
    absltest.main()
