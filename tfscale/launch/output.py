"""Output of the launcher, which works without a reader."""

import os
import sys
from typing import TextIO


def write(stream: TextIO | None, text: str) -> None:
    """Writes a line in one piece, so that two processes do not mix.

    Characters that the stream cannot encode are replaced. After the reader is
    gone (`| head`, a closed terminal) nothing more is written.
    """
    if stream is None:
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(f"{text}\n".encode(encoding, "replace").decode(encoding))
        stream.flush()
    except OSError as error:
        # The rest of its buffer is flushed there at the end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        if stream is not sys.stderr:
            say(f"going on without printing: {error}")


def say(text: str) -> None:
    """Writes a line of the launcher's own to stderr."""
    write(sys.stderr, f"[launch] {text}")
