"""Checks, before TensorFlow starts, that all processes are there and agree.

TensorFlow waits without a word for a host that is not there. Here each process
listens at its own address and calls on every other one:

        a:2222                    b:2222
    listens, calls b  ──facts──►  answers with its own facts
    answers           ◄──facts──  listens, calls a

A process is done once it has reached all and all have reached it, so none
leaves before all have called it. The ports are then free again for TensorFlow's
own servers.

A caller must be the process that answers at the address it gives: each process
sends its random word both ways. Together the words make one that strangers do
not know.
"""

import concurrent.futures
import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping

from tfscale.cluster import reception
from tfscale.cluster.cluster import Cluster
from tfscale.cluster.liveness import ports
from tfscale.cluster.reception import Reception

_SECONDS_BETWEEN_CALLS = 0.2
# A process that was reached is not called again.
_SECONDS_TO_HEAR = 60.0
_SECONDS_TO_SPEAK = 2.0
# Per address: a process calls once, and may have been restarted.
_MAX_CALLS = 256
_WORD_LENGTH = 32


class MissingError(ConnectionError):
    """Processes of a cluster are missing."""

    def __init__(self, text: str, addresses: Iterable[str]):
        super().__init__(text)
        self.addresses = list(addresses)


def preflight(
    cluster: Cluster,
    facts: Mapping[str, str],
    *,
    timeout: float = 60.0,
    patience: float = 3.0,
    say: Callable[[str], None] = logging.warning,
    about: str = "",
) -> str:
    """Returns once all processes of a cluster have reached each other.

    Args:
        cluster: The cluster.
        facts: Values that must be equal in all of them, by name:
            versions and the like.
        timeout: Seconds after which a process that was not reached, or did
            not call, is an error.
        patience: Seconds after which those that are waited for are named.
        say: Called with the names of missing processes.
        about: Only processes with an equal value meet.

    Returns:
        A word that only the processes that have met know.

    Raises:
        MissingError: If a process is missing; says which, and why.
        OSError: If this process' own port is in use.
        ValueError: If a fact differs; says where, and what it is there.

    Example:

    >>> preflight(Cluster({"worker": ("localhost:0",)}, "worker", 0), {})
    ''
    """
    others = [a for a in cluster.addresses if a != cluster.address]
    if not others:
        return ""
    jobs = json.dumps(dict(cluster.jobs))
    facts = {**facts, "addresses, in the same order": jobs}
    return _Preflight(cluster, others, facts, about).run(timeout, patience, say)


def survivors(
    cluster: Cluster,
    facts: Mapping[str, str],
    *,
    least: int,
    timeout: float = 60.0,
    say: Callable[[str], None] = logging.warning,
) -> Cluster:
    """The cluster of the workers that have reached each other, by agreement.

        a   reaches b, and not c ──► with b, about {a, b} ──► goes on with b
        b   reaches a, and not c ──► with a, about {a, b} ──► goes on with a
        c   is lost; if it comes later, it is not answered

    Raises:
        ConnectionError: If too few are there, or others have found others.
        OSError: If this process' own port is in use.
        ValueError: If a fact differs.
    """
    try:
        preflight(cluster, facts, timeout=timeout, say=say)
    except MissingError as error:
        gone = error.addresses
        left = tuple(a for a in cluster.addresses if a not in gone)
        if len(left) < least:
            raise
        say(
            f"Without {', '.join(gone)}: {len(left)} of "
            f"{len(cluster.addresses)} are left, {least} at least."
        )
        cluster = Cluster(
            {"worker": left}, "worker", left.index(cluster.address)
        )
    together = ",".join(cluster.addresses)
    preflight(cluster, facts, timeout=timeout, say=say, about=together)
    return cluster


class _Preflight:
    def __init__(self, cluster, others, facts, about):
        self._address = cluster.address
        self._about = about
        self._facts = facts
        self._word = secrets.token_hex(_WORD_LENGTH // 2)
        # Members' messages have about the same size.
        self._max_bytes = max(
            reception.MAX_LINE_BYTES, 2 * len(self._message())
        )
        # For each other process: why it was not reached, its answer, and the
        # words of callers that gave its address.
        self._unreached = dict.fromkeys(others, "not tried yet")
        self._found = {}
        self._calls = {address: set() for address in others}
        self._strange = None
        self._is_here: list[str] = []  # addresses at which this one answers
        self._is_over = threading.Event()

    def run(self, timeout, patience, say):
        with (
            Reception(ports.listen(self._address), self._greet),
            concurrent.futures.ThreadPoolExecutor(len(self._calls)) as threads,
        ):
            threads.map(self._call, self._calls)
            try:
                self._wait(timeout, patience, say)
                self._compare()
            finally:
                self._is_over.set()
        words = [self._word, *(found["word"] for found in self._found.values())]
        return hashlib.sha256("".join(sorted(words)).encode()).hexdigest()

    def _wait(self, timeout, patience, say):
        start = time.monotonic()
        is_logged = False
        while missing := self._missing():
            if self._is_here:
                raise ValueError(
                    "Each process of a cluster must have an address of its "
                    f"own. Received: {self._address!r} and "
                    f"{self._is_here[0]!r}, which are one process. Give each "
                    "process of a machine another port."
                )
            waited = time.monotonic() - start
            reasons = "; ".join(f"{a} ({why})" for a, why in missing.items())
            if waited > timeout:
                stranger = ""
                if self._strange is not None:
                    stranger = (
                        f" {self._strange!r} has called, which is none of the "
                        "addresses here."
                    )
                raise MissingError(
                    "All processes of a cluster must be there. Received: after "
                    f"{timeout:g} s, at {self._address}, still missing: "
                    f"{reasons}.{stranger} Start them, or correct the "
                    "addresses.",
                    missing,
                )
            if waited > patience and not is_logged:
                is_logged = True
                say(f"Waiting for {reasons}.")
            time.sleep(0.02)

    def _greet(self, connection):
        caller = self._read(connection)
        if caller["about"] != self._about:
            return
        calls = self._calls.get(caller["address"])
        if calls is None and caller["word"] != self._word:
            self._strange = caller["address"][:100]
            return
        connection.settimeout(_SECONDS_TO_SPEAK)
        connection.sendall(self._message())
        if calls is None:
            return  # It is this process, by another of its names.
        # A call counts once the caller has received the answer.
        heard = reception.read_line(connection, _SECONDS_TO_HEAR)
        if heard == "heard" and len(calls) < _MAX_CALLS:
            calls.add(caller["word"])

    def _read(self, connection):
        """The message of a member; raises `ValueError` if it is none."""
        text = reception.read_line(
            connection, _SECONDS_TO_SPEAK, max_bytes=self._max_bytes
        )
        if not text:
            raise ConnectionError("it does not answer")
        try:
            message = json.loads(text)
        except RecursionError:
            message = None
        if not (
            isinstance(message, dict)
            and isinstance(message.get("facts"), dict)
            and all(
                isinstance(message.get(name), str)
                for name in ("address", "about", "word")
            )
            and len(message["word"]) == _WORD_LENGTH
        ):
            raise ValueError("Not what a process of a cluster says.")
        return message

    def _call(self, address):
        num_answered = None  # its calls, when it last answered one from here
        while not (self._is_over.is_set() or self._is_met(address)):
            # Called again only if another process calls with its address: it
            # may have been restarted.
            num_calls = len(self._calls[address])
            if num_calls != num_answered:
                reason = self._call_once(address)
                if reason is None:
                    num_answered = num_calls
                else:
                    self._unreached[address] = reason
            self._is_over.wait(_SECONDS_BETWEEN_CALLS)

    def _call_once(self, address):
        try:
            with ports.connect(address) as connection:
                connection.sendall(self._message())
                answer = self._read(connection)
                if answer["address"] != address:
                    if answer["word"] == self._word:
                        self._is_here.append(address)
                    return f"{answer['address']} answers there"
                connection.sendall(b"heard\n")
                self._found[address] = answer
                return None
        except (OSError, ValueError) as error:
            return ports.reason(error)

    def _message(self):
        text = {"address": self._address, "facts": self._facts}
        text |= {"about": self._about, "word": self._word}
        return json.dumps(text).encode() + b"\n"

    def _is_met(self, address):
        found = self._found.get(address)
        return found is not None and found["word"] in self._calls[address]

    def _missing(self):
        """Addresses, and why each is missing."""
        return {
            address: "it did not call" if address in self._found else reason
            for address, reason in sorted(self._unreached.items())
            if not self._is_met(address)
        }

    def _compare(self):
        for address, found in sorted(self._found.items()):
            facts = found["facts"]
            for name in sorted({*facts, *self._facts}):
                here, there = self._facts.get(name), facts.get(name)
                if here != there:
                    raise ValueError(
                        "All processes of a cluster must have the same "
                        f"{name}. Received: {here} at {self._address}, "
                        f"{there} at {address}."
                    )
