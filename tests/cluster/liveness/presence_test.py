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
from tfscale.cluster.liveness import presence
from tfscale.cluster.liveness.presence import Presence
from tfscale.cluster.liveness.presence import Roster

CHIEF = "chief:1"


def _meet(servers):
    """A roster, and the presences of its servers."""
    roster, presences = Roster(), {}

    def arrive(server):
        presences[server] = Presence(server, CHIEF, 10.0)
        presences[server].be_ready()

    threads = [threading.Thread(target=arrive, args=(s,)) for s in servers]
    for thread in threads:
        thread.start()
    roster.wait_for(servers, 10.0)
    for thread in threads:
        thread.join()
    return roster, presences


def end_all(roster, error=None):
    """As a chief does: it says so, and its connections close."""
    roster.end(error)
    for connection in roster.connections.values():
        with contextlib.suppress(OSError):  # One may be closed already.
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


class PresenceTest(absltest.TestCase):
    def test_servers_are_told_of_the_end(self):
        roster, presences = _meet(forked_processes.free_addresses(2))
        lost = []
        roster.watch(lambda *what: lost.append(what))
        end_all(roster)
        for one in presences.values():
            one.wait_for_end()
        self.assertEmpty(lost)

    def test_a_server_that_ends_is_named_at_once(self):
        here, gone = forked_processes.free_addresses(2)
        roster, presences = _meet([here, gone])
        lost, is_lost = [], threading.Event()

        def on_lost(*what):
            lost.append(what)
            is_lost.set()

        roster.watch(on_lost)
        presences[gone].connection.close()
        self.assertTrue(is_lost.wait(10.0))
        self.assertEqual(lost, [(gone, True)])
        end_all(roster)
        presences[here].wait_for_end()

    def test_a_chief_that_ends_without_a_word_is_an_error(self):
        (server,) = forked_processes.free_addresses(1)
        roster, presences = _meet([server])
        for connection in roster.connections.values():
            connection.close()
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

        for end in (presences[server].connection, roster.connections[server]):
            self.assertTrue(
                end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            )
            self.assertBetween(seconds(end), 5, 14)
        roster.watch(print)
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
            roster, lost = Roster(), []
            connection = mock.MagicMock(**{"makefile.side_effect": error})
            roster.connections["b:1"] = connection
            is_lost = threading.Event()

            def on_lost(*what, lost=lost, is_lost=is_lost):
                lost.append(what)
                is_lost.set()

            roster.watch(on_lost)
            self.assertTrue(is_lost.wait(10.0))
            self.assertEqual(lost, [("b:1", answers)])

    def test_who_never_came_is_named(self):
        missing, here = forked_processes.free_addresses(2)
        start = time.monotonic()
        with self.assertRaisesRegex(
            ConnectionError,
            rf"All workers must be .*: {missing} \(nothing listens at its port",
        ):
            Roster(others="workers").wait_for([missing], 0.3)
        with (
            mock.patch.object(presence, "_SECONDS_WITHOUT_WORDS", 0.02),
            self.assertLogs(level="WARNING") as said,
            self.assertRaisesRegex(
                ConnectionError, f"must have a chief. Received: no .* {CHIEF}"
            ),
        ):
            Presence(here, CHIEF, 0.3)
        # For up to 600 s it had said nothing.
        (line,) = said.output
        self.assertIn(f"Waiting for the chief at {CHIEF}.", line)
        self.assertLess(time.monotonic() - start, 5.0)

    def test_one_that_does_not_get_ready_is_named(self):
        (server,) = forked_processes.free_addresses(1)
        found = []
        thread = threading.Thread(
            target=lambda: found.append(Presence(server, CHIEF, 10.0))
        )
        thread.start()
        with self.assertRaisesRegex(ConnectionError, f"missing: {server} "):
            Roster().wait_for([server], 0.5)
        thread.join()
        found[0].connection.close()

    def test_one_that_was_lost_is_called_again(self):
        (server,) = forked_processes.free_addresses(1)
        roster, presences = _meet([server])
        roster.watch()
        presences[server].connection.close()
        again = Presence(server, CHIEF, 10.0)
        again.be_ready()
        roster.wait_for([server], 10.0)
        end_all(roster)
        again.wait_for_end()

    def test_a_chief_that_fails_says_so(self):
        (server,) = forked_processes.free_addresses(1)
        roster, presences = _meet([server])
        end_all(roster, ValueError("no\nfile"))
        with self.assertRaisesRegex(
            ConnectionError, f"{CHIEF} has failed with ValueError: no. What it"
        ):
            presences[server].wait_for_end()

    def test_a_chief_without_all_others_says_so_to_those_there(self):
        here, missing = forked_processes.free_addresses(2)
        found, roster = [], Roster()

        def arrive():
            found.append(Presence(here, CHIEF, 10.0))
            found[0].be_ready()

        thread = threading.Thread(target=arrive)
        thread.start()
        roster.wait_for([here], 10.0)
        thread.join()
        with self.assertRaises(ConnectionError) as error:
            roster.wait_for([here, missing], 0.2)
        end_all(roster, error.exception)
        with self.assertRaisesRegex(
            ConnectionError, f"{CHIEF} has failed with .*missing: {missing}"
        ):
            found[0].wait_for_end()

    def test_a_forked_child_does_not_keep_connections_open(self):
        (server,) = forked_processes.free_addresses(1)
        roster, presences = _meet([server])
        read, write = os.pipe()
        child = forked_processes.fork(lambda: os.read(read, 1))
        roster.connections[server].close()
        with self.assertRaisesRegex(ConnectionError, "is gone"):
            presences[server].wait_for_end()
        os.write(write, b"x")
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


if __name__ == "__main__":
    absltest.main()
