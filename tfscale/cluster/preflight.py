"""Before TensorFlow starts: can every process be reached, and do all agree?

TensorFlow waits without a word for a host that is not there. Here each process
listens at its own address and calls on every other one:

        a:2222                    b:2222
    listens, calls b  ──facts──►  answers with its own facts
    answers           ◄──facts──  listens, calls a

It is over for a process once it has reached all and all have reached it, so
nobody leaves who is still to be called on. The ports are then free again for
TensorFlow's own servers.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

from tfscale.cluster import ports
from tfscale.cluster.cluster import Cluster

_SECONDS_BETWEEN_CALLS = 0.2
# A process that was reached is not called again, however late it hears that.
_SECONDS_TO_HEAR = 60.0


class MissingError(ConnectionError):
    """Processes of a cluster are missing.

    Args:
        text: Says which, and why.
        addresses: Theirs.
    """

    def __init__(self, text: str, addresses: Sequence[str]):
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
) -> None:
    """Returns once all processes of a cluster have reached each other.

    Args:
        cluster: The cluster.
        facts: What must be equal in all of them beside the addresses, by name:
            versions and the like.
        timeout: Seconds after which a process that was not reached, or did
            not call, is an error.
        patience: Seconds after which those that are waited for are named.
        say: Is told who is waited for.
        about: Those who have this in common meet, and others are missing.

    Raises:
        MissingError: If a process is missing; says which, and why.
        OSError: If this process' own port is in use.
        ValueError: If a fact differs; says where, and what it is there.

    Example:

    >>> preflight(Cluster({"worker": ("localhost:0",)}, "worker", 0), {})
    """
    others = [a for a in cluster.addresses if a != cluster.address]
    if not others:
        return
    jobs = {job: list(addresses) for job, addresses in cluster.jobs.items()}
    facts = {**facts, "addresses, in the same order": json.dumps(jobs)}
    found = _Preflight(cluster, others, facts, about)
    found.run(timeout, patience, say)


class _Preflight:
    def __init__(self, cluster, others, facts, about):
        self._address = cluster.address
        self._about = about
        self._facts = facts
        self._lock = threading.Lock()
        # Of each other process: why it was not reached so far, its facts.
        self._unreached = dict.fromkeys(others, "not tried yet")
        self._silent = set(others)
        self._found = {}
        self._over = threading.Event()

    def run(self, timeout, patience, say):
        start = time.monotonic()
        with ports.listen(self._address) as listener:
            listener.settimeout(_SECONDS_BETWEEN_CALLS)
            threads = [
                threading.Thread(target=self._call, args=(a,), daemon=True)
                for a in self._unreached
            ]
            threads.append(
                threading.Thread(
                    target=self._answer, args=(listener,), daemon=True
                )
            )
            for thread in threads:
                thread.start()
            said = False
            try:
                while not self._is_done():
                    waited = time.monotonic() - start
                    if waited > timeout:
                        raise MissingError(
                            "All processes of a cluster must be there. "
                            f"Received: after {timeout:g} s, at "
                            f"{self._address}, still missing: "
                            f"{self._missing()}. Start them, or correct the "
                            "addresses.",
                            self._reasons(),
                        )
                    if waited > patience and not said:
                        said = True
                        say(f"Waiting for {self._missing()}.")
                    time.sleep(0.02)
                self._compare()
            finally:
                self._over.set()
                for thread in threads:
                    thread.join()

    def _answer(self, listener):
        while not self._over.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            threading.Thread(
                target=self._greet, args=(connection,), daemon=True
            ).start()

    def _greet(self, connection):
        with connection:
            try:
                connection.settimeout(2.0)
                reader = connection.makefile()
                caller = json.loads(reader.readline())
                if caller["about"] != self._about:
                    return
                connection.sendall(self._message())
                # Counts only once the caller has heard the answer.
                connection.settimeout(_SECONDS_TO_HEAR)
                if reader.readline().strip() == "heard":
                    with self._lock:
                        self._found[caller["address"]] = caller["facts"]
                        self._silent.discard(caller["address"])
            except (OSError, ValueError, KeyError, TypeError):
                return  # Not one of us, or one that calls again.

    def _call(self, address):
        while not self._over.is_set():
            reason = self._call_once(address)
            with self._lock:
                if reason is None:
                    del self._unreached[address]
                    return
                self._unreached[address] = reason
            self._over.wait(_SECONDS_BETWEEN_CALLS)

    def _call_once(self, address):
        """Returns why the process was not reached, or None."""
        try:
            with ports.connect(address) as connection:
                connection.settimeout(2.0)
                connection.sendall(self._message())
                text = connection.makefile().readline()
                if not text:
                    return "it does not answer"
                answer = json.loads(text)
                if answer["address"] != address:
                    return f"{answer['address']} answers there"
                connection.sendall(b"heard\n")
                with self._lock:
                    self._found[address] = answer["facts"]
                return None
        except (ValueError, KeyError, TypeError):
            return "something else listens at its port"
        except OSError as error:
            return ports.reason(error)

    def _message(self):
        text = {"address": self._address, "facts": self._facts}
        return json.dumps({**text, "about": self._about}).encode() + b"\n"

    def _is_done(self):
        with self._lock:
            return not self._unreached and not self._silent

    def _reasons(self):
        """Why each one is missing that is, by address."""
        with self._lock:
            reasons = dict.fromkeys(sorted(self._silent), "it did not call")
            return {**reasons, **self._unreached}

    def _missing(self):
        reasons = self._reasons().items()
        return "; ".join(f"{address} ({why})" for address, why in reasons)

    def _compare(self):
        for address, facts in sorted(self._found.items()):
            for name in sorted({*facts, *self._facts}):
                here, there = self._facts.get(name), facts.get(name)
                if here != there:
                    raise ValueError(
                        "All processes of a cluster must have the same "
                        f"{name}. Received: {here} at {self._address}, "
                        f"{there} at {address}."
                    )
