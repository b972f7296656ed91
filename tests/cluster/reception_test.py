"""Strangers at the ports neither end, hold up nor fill what waits there.

One that sent a byte a second was listened to for ever, five that said nothing
took ten seconds, and any client that spoke JSON ended the run.
"""

import contextlib
import functools
import json
import socket
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_processes
from tfscale.cluster import Cluster
from tfscale.cluster import ports
from tfscale.cluster import preflight
from tfscale.cluster import reception
from tfscale.cluster.reception import Reception
from tfscale.cluster.reception import read_line
from tfscale.cluster.rendezvous import Rendezvous


def _connect(address):
    """A connection with what begins to listen there."""
    end = time.monotonic() + 10.0
    while True:
        try:
            return ports.connect(address)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise


class _StrangersTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.over = threading.Event()

    def begin(self, work, *args):
        thread = threading.Thread(target=work, args=args, daemon=True)
        thread.start()
        self.addCleanup(thread.join, 10.0)
        self.addCleanup(self.over.set)
        return thread

    def stranger(self, address, words, then=b""):
        """Says something at an address, and stays."""
        connection = _connect(address)
        self.addCleanup(connection.close)
        connection.sendall(words)

        def go_on():
            with contextlib.suppress(OSError):
                while then and not self.over.wait(0.01):
                    connection.sendall(then)

        self.begin(go_on)
        return connection

    def strangers(self, address, beginning=b""):
        for words, then in (
            (b"", b""),
            (b"", b""),
            (b"", b""),
            (beginning, b"x"),
            (b"GET / HTTP/1.1\r\n\r\n", b""),
            (b"\xff\x00\n", b""),
            (b"[" * 60_000 + b"\n", b""),
            (b"null\n", b""),
            (beginning, b"x" * 65_536),
        ):
            with contextlib.suppress(OSError):  # It may be sent away early.
                self.stranger(address, words, then)


class PreflightTest(_StrangersTest):
    def test_strangers_do_not_end_or_hold_up_a_preflight(self):
        addresses = tuple(forked_processes.free_addresses(2))
        have_met = []

        def run(index):
            cluster = Cluster({"worker": addresses}, "worker", index)
            preflight(cluster, {"version": "1"}, timeout=20.0)
            have_met.append(index)

        first = self.begin(run, 0)
        self.strangers(addresses[0], b'{"address": "')
        said = {"facts": {}, "about": "", "word": "0" * 32}
        for changes in (
            dict(facts=None, address=addresses[1]),
            dict(address="x:1"),
            dict(address=addresses[1], word=3),
            dict(address=[]),
            dict(address=addresses[1]),  # no other can be told from a member
        ):
            line = json.dumps({**said, **changes}).encode() + b"\n"
            self.stranger(addresses[0], line + b"heard\n")
        start = time.monotonic()
        second = self.begin(run, 1)
        for thread in (first, second):
            thread.join(20.0)
        self.assertLess(time.monotonic() - start, 10.0)
        self.assertCountEqual(have_met, [0, 1])

    def test_who_calls_in_the_name_of_another_is_not_counted(self):
        own, other = forked_processes.free_addresses(2)
        cluster = Cluster({"worker": (own, other)}, "worker", 0)
        said = {"address": other, "facts": {}, "about": "", "word": "1" * 32}

        def call():
            line = json.dumps(said).encode() + b"\n"
            self.stranger(own, line + b"heard\n")
            self.stranger(own, line.replace(other.encode(), b"x:1"))

        self.begin(call)
        with self.assertRaisesRegex(
            ConnectionError, f"missing: {other} .*'x:1' has called"
        ):
            preflight(cluster, {}, timeout=1.5)

    def test_one_that_was_started_again_is_met(self):
        # It was called before that, and is another one to whom it calls now.
        own, other = forked_processes.free_addresses(2)
        clusters = [
            Cluster({"worker": (own, other)}, "worker", index)
            for index in range(2)
        ]
        places = [Rendezvous(cluster, {}) for cluster in clusters]
        first = self.begin(lambda: places[0].meet(20.0, first=own))
        with ports.listen(other) as listener:
            called, _ = listener.accept()
            with called:
                line = json.loads(read_line(called, 5.0))
                line |= {"address": other, "word": "2" * 32}
                called.sendall(json.dumps(line).encode() + b"\n")
                self.assertEqual(read_line(called, 5.0), "heard")
        places[1].meet(20.0, first=own)
        first.join(20.0)
        # The connection that stays is with this one.
        places[0].tell("words")
        with places[1].connections[own] as connection:
            self.assertEqual(read_line(connection, 5.0), "words")
        places[0].connections[other].close()


class ServerTest(_StrangersTest):
    """One that waits for its chief, which calls it."""

    def places(self, *servers):
        clusters = [
            Cluster({"chief": ("c:1",), "ps": servers}, job, 0)
            for job in ("chief", "ps")
        ]
        return (
            Rendezvous(clusters[0], {}, about="x", called=servers, callers=()),
            Rendezvous(clusters[1], {}, about="x", called=(), callers=["c:1"]),
        )

    def test_strangers_do_not_hold_up_a_server(self):
        (address,) = forked_processes.free_addresses(1)
        chief, server = self.places(address)
        waiting = self.begin(lambda: server.meet(20.0, first="c:1"))
        self.strangers(address, b'{"address": "')
        said = {"facts": {}, "address": "c:1", "word": "0" * 32}
        for words in (
            *(b"chief\n", json.dumps({**said, "about": ""}).encode() + b"\n"),
            json.dumps({**said, "address": "a:1", "about": "x"}).encode()
            + b"\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00",
        ):
            stranger = self.stranger(address, words)
            stranger.settimeout(5.0)
            with contextlib.suppress(ConnectionResetError):
                self.assertEqual(stranger.recv(10), b"")
        start = time.monotonic()
        chief.meet(5.0, first="c:1")
        waiting.join(5.0)
        self.assertLess(time.monotonic() - start, 5.0)
        for place in (chief, server):
            for connection in place.connections.values():
                connection.close()

    def test_strangers_do_not_put_off_the_end_of_waiting(self):
        (address,) = forked_processes.free_addresses(1)
        self.begin(self.strangers, address, b'{"address": "')
        start = time.monotonic()
        with self.assertRaisesRegex(
            ConnectionError, "missing: c:1 .it did not"
        ):
            self.places(address)[1].meet(1.0, first="c:1")
        self.assertLess(time.monotonic() - start, 5.0)

    def test_strangers_at_an_address_are_named_in_time(self):
        # TensorFlow's server, say, of another job; or one that says nothing.
        with ports.serve(0) as silent, ports.serve(0) as other:
            names = [f"localhost:{s.getsockname()[1]}" for s in (silent, other)]

            def answer():
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = other.accept()
                        with connection:
                            connection.sendall(b"\x00\x00\x12\x04")

            self.begin(answer)
            with self.assertRaisesRegex(
                ConnectionError,
                f"{names[1]} .something else listens at its port",
            ):
                self.places(*names)[0].meet(2.5, first="c:1")
            other.shutdown(socket.SHUT_RDWR)


class ReceptionTest(_StrangersTest):
    def test_of_too_many_callers_the_first_one_has_to_go(self):
        with mock.patch.object(reception, "_MAX_CALLERS", 3):
            listener = ports.serve(0)
            address = f"localhost:{listener.getsockname()[1]}"
            kept = {}

            def greet(caller):
                name = read_line(caller, 60.0)
                keep = functools.partial(kept.__setitem__, name, caller)
                return keep if name else None

            with Reception(listener, greet):
                callers = [self.stranger(address, b"") for _ in range(4)]
                callers[0].settimeout(10.0)
                self.assertEqual(callers[0].recv(1), b"")
                callers[2].sendall(b"third\n")
                end = time.monotonic() + 10.0
                while "third" not in kept:
                    self.assertLess(time.monotonic(), end)
                    time.sleep(0.01)
            callers[1].settimeout(10.0)
            self.assertEqual(callers[1].recv(1), b"")
        with kept["third"] as connection:
            connection.sendall(b"x")
            self.assertEqual(callers[2].recv(1), b"x")

    def test_a_line_has_a_limit_and_what_follows_it_is_not_read(self):
        near, far = socket.socketpair()
        with near, far:
            far.sendall(b"one\ntwo\n" + b"x" * 70_000)
            self.assertEqual(read_line(near, 5.0), "one")
            self.assertEqual(read_line(near, 5.0), "two")
            with self.assertRaisesRegex(ValueError, "more than 65536 bytes"):
                read_line(near, 5.0)

    def test_a_byte_now_and_then_is_no_line_in_time(self):
        near, far = socket.socketpair()
        with near, far:

            def drip():
                with contextlib.suppress(OSError):
                    while not self.over.wait(0.01):
                        far.sendall(b"x")

            self.begin(drip)
            with self.assertRaises(TimeoutError):
                read_line(near, 0.3)
            self.over.set()

    def test_callers_of_ipv6_are_heard_too(self):
        if not socket.has_dualstack_ipv6():
            self.skipTest("This machine has no IPv6.")
        with ports.serve(0) as listener:
            port = listener.getsockname()[1]
            for host in ("[::1]", "127.0.0.1"):
                ports.connect(f"{host}:{port}").close()


if __name__ == "__main__":
    absltest.main()
