"""Workers end together, or one takes away what another one still needs.

At the end of a collective one worker may have its sum while another one still
fetches its part, from a process that has nothing more to do. So each says that
it has come to its end and waits for the others; worker 0, which has the service
by which they say so, stays until all know:

    worker 0    "end" ── knows of all ──────────────── all are gone ── exits
    worker 1    "end" ── knows of all ── "gone", exits
"""

import logging
import sys
import threading
import time

import tensorflow as tf

from tfscale import _internals

_PREFIX = "tfscale/leaving"


def leave(
    count: int,
    index: int,
    is_missed: threading.Event,
    timeout: float = 30.0,
) -> None:
    """Returns once all workers have come to their end.

    A worker that ends by an error does not wait for the others, nor one for
    which they wait somewhere else.

    Args:
        count: Number of workers.
        index: Which of them this is.
        is_missed: Set if the others are not at their end, and wait for it.
        timeout: Seconds after which the others are not waited for any more.
    """
    if getattr(sys, "last_value", None) is not None:
        return
    end = time.monotonic() + timeout
    others = [other for other in range(count) if other != index]
    try:
        _internals.put_key_value(f"{_PREFIX}/end/{index}", "")
        _wait_for("end", others, end, is_missed)
        _internals.put_key_value(f"{_PREFIX}/gone/{index}", "")
        if index == 0:
            _wait_for("gone", others, end, is_missed)
    except tf.errors.OpError as error:
        logging.info("Another worker has ended before: %s", error)


def _wait_for(what, others, end, is_missed):
    for other in others:
        key = f"{_PREFIX}/{what}/{other}"
        while not (
            is_missed.is_set()
            or time.monotonic() > end
            or _internals.get_key_value(key, 200) is not None
        ):
            pass
