"""What the launcher prints: a program goes on, whoever can read it or not."""

import os
import sys
from typing import TextIO


def write(stream: TextIO | None, text: str) -> None:
    """Writes a line, in one piece: those of two processes do not mix.

    A character that the stream cannot encode is replaced. Where nobody reads
    any more (`| head`, a terminal that was closed) nothing more is written.

    Example:

    >>> write(sys.stdout, "worker 0: epoch 1")
    worker 0: epoch 1
    """
    if stream is None:
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(f"{text}\n".encode(encoding, "replace").decode(encoding))
        stream.flush()
    except OSError as error:
        # What is left in its buffer has to go somewhere at the end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        if stream is not sys.stderr:
            say(f"going on without printing: {error}")


def say(text: str) -> None:
    """Writes a line of the launcher's own to stderr."""
    write(sys.stderr, f"[launch] {text}")
