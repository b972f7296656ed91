"""Text to learn from: windows of bytes, and the bytes that follow them."""

import glob
import os
import sysconfig

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
    files = sorted(glob.glob(pattern))
    if len(files) < 2:
        raise app.UsageError(
            "--text_files must match two files or more. Received: "
            f"{pattern}, which matches {len(files)}."
        )

    def windows(files):
        return data.pipeline(
            data.text(files, sequence_length),
            batch_size=batch_size,
            parse=parse,
            seed=seed,
            remainder="drop",
            input_context=input_context,
        ).repeat()

    train = [name for index, name in enumerate(files) if index % 20]
    return windows(train), windows(files[::20])
