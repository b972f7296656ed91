"""Who is missing, or does not agree, is named within seconds."""

import json
import socket
import threading
import time

from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_processes
from tfscale.cluster import Cluster
from tfscale.cluster import ports
from tfscale.cluster import preflight
from tfscale.cluster.preflight import survivors


def _run_all(addresses, facts, delays=(), clusters=None):
    """What each of the processes, here threads, got: an error or None."""
    clusters = clusters or [
        Cluster({"worker": addresses}, "worker", index)
        for index in range(len(addresses))
    ]
    errors = [None] * len(addresses)

    def run(index):
        if delays:
            time.sleep(delays[index])
        try:
            preflight(clusters[index], facts[index], timeout=10.0)
        except Exception as error:
            errors[index] = error

    threads = [
        threading.Thread(target=run, args=(i,)) for i in range(len(addresses))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


class PreflightTest(parameterized.TestCase):
    def test_all_meet_though_they_come_one_after_the_other(self):
        addresses = forked_processes.free_addresses(4)
        errors = _run_all(addresses, [{"version": "1"}] * 4, (0, 0.5, 0.1, 0))
        self.assertEqual(errors, [None] * 4)

    def test_one_that_stood_still_for_a_moment_is_not_missed(self):
        # It had been called, and its own call was never heard of again.
        own, other = forked_processes.free_addresses(2)
        cluster = Cluster({"worker": (own, other)}, "worker", 0)
        errors = []

        def run():
            try:
                preflight(cluster, {}, timeout=8.0)
            except ConnectionError as error:
                errors.append(error)

        with ports.listen(other) as listener:
            thread = threading.Thread(target=run)
            thread.start()
            called, _ = listener.accept()
            with called, called.makefile("rw") as lines:
                words = json.loads(lines.readline())
                words["address"] = other
                lines.write(json.dumps(words) + "\n")
                lines.flush()
            with ports.connect(own) as call, call.makefile("rw") as lines:
                lines.write(json.dumps(words) + "\n")
                lines.flush()
                lines.readline()
                time.sleep(2.5)
                lines.write("heard\n")
            thread.join()
        self.assertEmpty(errors)

    def test_the_ports_are_free_again(self):
        (address, other) = forked_processes.free_addresses(2)
        _run_all((address, other), [{}] * 2)
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", int(address.split(":")[1])))

    def test_another_order_of_addresses_is_named_everywhere(self):
        # Of `--hosts=a,b` there and `--hosts=b,a` here: each was worker 0, and
        # waited a minute for the other one.
        addresses = forked_processes.free_addresses(2)
        clusters = [
            Cluster({"worker": order}, "worker", 0)
            for order in (addresses, addresses[::-1])
        ]
        for error in _run_all(addresses, [{}] * 2, clusters=clusters):
            self.assertRegex(
                str(error), "the same addresses, in the same order. Received: "
            )

    def test_another_version_is_named_everywhere(self):
        addresses = forked_processes.free_addresses(3)
        facts = [{"version of Keras": v} for v in ("3.15", "3.14", "3.15")]
        for error in _run_all(addresses, facts):
            self.assertRegex(
                str(error),
                "the same version of Keras. Received: 3.1[45] at .*, 3.1[45] ",
            )
            self.assertIn(addresses[1], str(error))

    @parameterized.parameters(
        ("localhost:9", "nothing listens at its port"),
        ("no-such-host.invalid:2222", "its name cannot be resolved"),
    )
    def test_who_is_not_there_is_named(self, missing, reason):
        (own,) = forked_processes.free_addresses(1)
        cluster = Cluster({"worker": (own, missing)}, "worker", 0)
        said, start = [], time.monotonic()
        with self.assertRaisesRegex(
            ConnectionError, rf"still missing: {missing} \({reason}\)"
        ):
            preflight(cluster, {}, timeout=1.0, patience=0.3, say=said.append)
        self.assertLess(time.monotonic() - start, 10.0)
        (line,) = said
        self.assertIn(missing, line)

    @parameterized.parameters("127.0.0.1", "127.0.0.2")
    def test_one_process_of_two_names_is_named_by_both(self, name):
        # It heard itself, and that it was "none of the addresses here".
        (own,) = forked_processes.free_addresses(1)
        other = f"{name}:{own.split(':')[1]}"
        cluster = Cluster({"worker": (own, other)}, "worker", 0)
        start = time.monotonic()
        with self.assertRaisesRegex(
            ValueError, f"'{own}' and '{other}', which are one process"
        ):
            preflight(cluster, {}, timeout=20.0)
        self.assertLess(time.monotonic() - start, 10.0)

    def test_a_port_in_use_is_named_at_once(self):
        own, other = forked_processes.free_addresses(2)
        with (
            ports.listen(own),
            self.assertRaisesRegex(OSError, f"{own}.*is in use"),
        ):
            preflight(Cluster({"worker": (own, other)}, "worker", 0), {})

    def test_something_else_at_the_port_is_no_worker(self):
        own, other = forked_processes.free_addresses(2)
        with ports.listen(other) as server:

            def answer():
                connection, _ = server.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

            threading.Thread(target=answer, daemon=True).start()
            with self.assertRaisesRegex(ConnectionError, other):
                preflight(
                    Cluster({"worker": (own, other)}, "worker", 0),
                    {},
                    timeout=0.5,
                )


class SurvivorsTest(parameterized.TestCase):
    @parameterized.parameters((3, 3, 2), (3, 2, 2), (3, 2, 3), (2, 1, 2))
    def test_enough_of_them_are_there_or_it_is_an_error(
        self, count, there, least
    ):
        addresses = forked_processes.free_addresses(count)
        found = [None] * there
        timeout = 1.5 if there < count else 20.0

        def run(index):
            cluster = Cluster({"worker": addresses}, "worker", index)
            try:
                left = survivors(
                    cluster, {}, least=least, timeout=timeout, say=len
                )
                found[index] = (left.addresses, left.address)
            except ConnectionError as error:
                found[index] = str(error)

        threads = [
            threading.Thread(target=run, args=(index,))
            for index in range(there)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index in range(there):
            if there >= least:
                expected = tuple(addresses[:there]), addresses[index]
                self.assertEqual(found[index], expected)
            else:
                self.assertIn(f"still missing: {addresses[-1]}", found[index])


if __name__ == "__main__":
    absltest.main()
