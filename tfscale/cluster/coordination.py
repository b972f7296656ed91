"""Named values that workers exchange beside collectives.

Each gives values to TensorFlow's coordination service, which worker 0 runs, and
takes the values of others:

    worker 0    give "folder" ──► take "files" of worker 1 ──► give "sealed"
    worker 1    take "folder" ──► give "files" ──────────────► take "sealed"

A worker waits for a value as long as all workers are alive.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfscale._internals import attributes

_MILLISECONDS = 200  # between two checks that all workers are alive
_PATIENCE_SECONDS = 15.0
_CHARACTERS = 240  # of a fact, in an error


@dataclasses.dataclass(eq=False)
class Coordination:
    """A worker in a group of workers; a single process is a group of one."""

    count: int = 1
    index: int = 0
    # Raises a `ConnectionError` if a worker is lost.
    check_all_there: Callable[[], None] = lambda: None
    # Whether a worker has begun to wait for all as often as this one.
    is_awaited_by: Callable[[int], bool] = lambda worker: False
    scope: str = "workers"  # prefix of its keys
    num_checks = 0  # of `check_same` whose fact has been given
    _is_over = False

    def give(self, name: str, value: Any) -> None:
        """Gives the others a JSON value; the first one of a name counts."""
        if self.count > 1:
            key = self._key(name, self.index)
            attributes.put_key_value(key, json.dumps(value))

    def take(
        self,
        name: str,
        index: int,
        subject: str | None = None,
        gives_up: Callable[[], bool] = lambda: False,
    ) -> Any:
        """The value of another worker; a long wait is logged with a `subject`.

        It is a `TimeoutError` if waiting was given up, and it is not there.
        """
        start = time.monotonic()
        is_given_up = False
        while not (self._is_over or is_given_up):
            is_given_up = gives_up()
            try:
                key = self._key(name, index)
                found = attributes.get_key_value(key, _MILLISECONDS)
            except tf.errors.OpError:
                self.check_all_there()
                raise
            if found is not None:
                return json.loads(found)
            self.check_all_there()
            if subject and time.monotonic() - start > _PATIENCE_SECONDS:
                logging.warning(
                    "Worker %d waits for worker %d, which has not reached "
                    "this step yet: %s.",
                    self.index,
                    index,
                    subject,
                )
                subject = None
        raise TimeoutError(f"Worker {index} is not waited for any more.")

    def _key(self, name, index):
        return f"tfscale/{self.scope}/{name}/{index}"

    def from_first(self, name: str, make: Callable[[], Any]) -> Any:
        """The JSON value that worker 0 makes; all workers raise its error."""
        if self.index:
            return self._take_result(name, 0)
        return self._give_result(name, make)

    def to_first(self, name: str, make: Callable[[], Any]) -> list[Any]:
        """The values of all workers, in worker 0, which raises their errors."""
        result = self._give_result(name, make)
        others = range(1, 1 if self.index else self.count)
        return [result, *(self._take_result(name, i) for i in others)]

    def _give_result(self, name, make):
        try:
            value = make()
        except Exception as error:
            self.give(name, {"error": str(error)})
            raise
        self.give(name, {"value": value})
        return value

    def _take_result(self, name, index):
        found = self.take(name, index)
        if "error" in found:
            raise OSError(f"Worker {index}: {found['error']}")
        return found["value"]

    def check_same(self, subject: str, fact: str | Mapping[str, str]) -> None:
        """Returns once all workers have passed the same subject and fact.

        Workers whose programs differ would wait for each other for ever, or sum
        unrelated tensors. Of several facts, by name, the first one that differs
        is named; they are sent only if one does.
        """
        name = f"check {self.num_checks + 1}"
        facts = {subject: fact} if isinstance(fact, str) else dict(fact)
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        self.give(name, [subject, digest])
        self.num_checks += 1
        for other in range(1, self.count) if self.index == 0 else [0]:
            waits = functools.partial(self.is_awaited_by, other)
            try:
                found = self.take(name, other, subject, waits)
            except TimeoutError:
                if self._is_over:
                    raise
                # It has begun something else that needs this worker.
                found = ["a step that needs all workers", ""]
            other_subject, other_digest = found
            if other_subject != subject:
                raise ValueError(
                    "All workers must do the same things in the same order. "
                    f"Received: {subject} in worker {self.index}, "
                    f"{other_subject} in worker {other}. Code that trains, "
                    "evaluates, predicts or creates variables must not depend "
                    "on the worker."
                )
            if other_digest != digest:
                self.give(f"facts {name}", facts)
                theirs = self.take(f"facts {name}", other, subject)
                self._raise_difference(other, facts, theirs)

    def _raise_difference(self, other, facts, theirs):
        name = next(
            n for n in {**facts, **theirs} if facts.get(n) != theirs.get(n)
        )
        here, there = _excerpts(str(facts.get(name)), str(theirs.get(name)))
        raise ValueError(
            f"All workers must have the same {name}. Received: {here} in "
            f"worker {self.index}, {there} in worker {other}. Run the same "
            "program with the same settings in each."
        )

    def first_to_claim(self, name: str) -> int:
        """The worker that claimed a name first; perhaps this one, now."""
        key = f"tfscale/{self.scope}/claimed/{name}"
        attributes.put_key_value(key, str(self.index))
        found = None
        while found is None:
            found = attributes.get_key_value(key, _MILLISECONDS)
        return int(found)

    def stop_waiting(self) -> None:
        """Ends all waiting here with a `TimeoutError`."""
        self._is_over = True

    def leave(self, is_missed: threading.Event, timeout: float = 30.0) -> None:
        """Returns once all workers have ended.

        At the end of a collective one worker may have its sum while another
        still receives data. Worker 0, which runs the service, stays until all
        know:

            worker 0    "end" ── knows of all ─────────── all are gone ── exits
            worker 1    "end" ── knows of all ── "gone", exits

        A worker that ends by an error does not wait, nor one that the others
        miss elsewhere.
        """
        if getattr(sys, "last_value", None) is not None:
            return
        end = time.monotonic() + timeout

        def gives_up():
            return is_missed.is_set() or time.monotonic() > end

        try:
            self._meet("end", range(self.count), gives_up)
            gone = range(self.count) if self.index == 0 else ()
            self._meet("gone", gone, gives_up)
        except (ConnectionError, tf.errors.OpError) as error:
            logging.info("Another worker has ended before: %s", error)

    def _meet(self, name, others, gives_up):
        self.give(name, None)
        try:
            for other in others:
                self.take(name, other, gives_up=gives_up)
        except TimeoutError as error:
            logging.info("%s", error)


def _excerpts(here, there):
    """Two texts from shortly before they differ."""
    pairs = enumerate(zip(here, there))
    start = next((i for i, (a, b) in pairs if a != b), 0) - _CHARACTERS // 2
    if max(len(here), len(there)) <= _CHARACTERS:
        start = 0
    return tuple(
        f"{'...' * (start > 0)}{text[max(start, 0) :][:_CHARACTERS]}"
        for text in (here, there)
    )
