"""Text to learn from: windows of bytes, and the bytes that follow them.

Either of files as they are, cut wherever a window ends, or of short documents,
several of which are packed into a window.
"""

import glob
import os
import re
import sysconfig

import numpy as np
from absl import app

from tfscale import data

VOCABULARY = 256  # a token is a byte

# The source of the Python standard library that runs this.
STANDARD_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "*.py")


def make_datasets(
    pattern, sequence_length, batch_size, seed, parse=None, input_context=None
):
    """Training and validation batches without end.

    Args:
        pattern: Glob of the files; every twentieth is for validation.
        sequence_length: Integer, bytes in a window.
        batch_size: Integer, windows in a batch, over all replicas.
        seed: Integer that the order is drawn from.
        parse: Function from `(tokens, targets)`, both int32 of shape
            `(sequence_length,)`, to what the model takes. By default that.
        input_context: `tf.distribute.InputContext` of a worker, for its part
            of the batches.

    Returns:
        Two `tf.data.Dataset`.
    """

    def windows(files):
        return data.pipeline(
            data.text(files, sequence_length),
            batch_size=batch_size,
            parse=parse,
            seed=seed,
            remainder="drop",
            input_context=input_context,
        ).repeat()

    train, validation = _split(pattern)
    return windows(train), windows(validation)


def make_packed_datasets(pattern, sequence_length, batch_size, seed):
    """As `make_datasets`, of documents: what stands between empty lines.

    In the source of Python that is a function, or a part of it with its
    documentation. How much of the batches is text is printed.

    Returns:
        Two `tf.data.Dataset` of `(x, y, sample_weight)`, as of `data.pack`.
    """

    def windows(files, name):
        source = data.pack(_documents(files), sequence_length)
        print(
            f"Packed for {name}: {source.num_documents} documents into "
            f"{source.num_records} rows, {source.utilization:.1%} used"
        )
        return data.pipeline(
            source, batch_size=batch_size, seed=seed, remainder="drop"
        ).repeat()

    train, validation = _split(pattern)
    return windows(train, "training"), windows(validation, "validation")


def _split(pattern):
    files = sorted(glob.glob(pattern))
    if len(files) < 2:
        raise app.UsageError(
            "--text_files must match two files or more. Received: "
            f"{pattern}, which matches {len(files)}."
        )
    train = [name for index, name in enumerate(files) if index % 20]
    return train, files[::20]


def _documents(files):
    """Bytes of each, with the line's end that tells that it is over."""
    for name in files:
        with open(name, "rb") as file:
            for document in re.split(rb"\n\s*\n", file.read()):
                yield np.frombuffer(document.rstrip() + b"\n", np.uint8)
