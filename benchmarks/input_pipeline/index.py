"""Seconds until large shards are indexed, and to the first batch, cold.

The shards are sparse files: what is measured is reading headers, not a disk.

python -m benchmarks.input_pipeline.index
"""

import os
import tempfile
import time

import tensorflow as tf

from tfscale import data

_GIB = 1 << 30
_RECORD = 110_000
_BATCH = 32


def _shard(path, size):
    """A file of records of zeros, of which only headers are on the disk."""
    with tf.io.TFRecordWriter(path) as writer:
        writer.write(bytes(_RECORD))
    with open(path, "rb") as file:
        contents = file.read()
    header, end = contents[:12], contents[-4:]
    step = len(contents)
    file = os.open(path, os.O_WRONLY)
    for at in range(step, size - step + 1, step):
        os.pwrite(file, header, at)
        os.pwrite(file, end, at + step - 4)
    os.close(file)


def _timed(text, function):
    begin, busy = time.perf_counter(), time.process_time()
    result = function()
    print(
        f"{text:40} {time.perf_counter() - begin:6.2f} s by the clock, "
        f"{time.process_time() - busy:6.2f} s of the processor",
        flush=True,
    )
    return result


def main():
    with tempfile.TemporaryDirectory() as folder:
        large = os.path.join(folder, "large")
        _shard(large, 10 * _GIB)
        _timed("one shard of 10 GiB", lambda: data.tfrecords(large))
        os.remove(large)
        for number in range(64):
            _shard(os.path.join(folder, f"{number}.tfrecord"), _GIB)
        pattern = os.path.join(folder, "*.tfrecord")
        kept = os.path.join(folder, "kept")
        for text, index_dir in (
            ("64 shards of 1 GiB, no index kept", None),
            ("the same, the index is written", kept),
            ("the same, the index is there", kept),
        ):
            _timed(
                text,
                lambda index_dir=index_dir: next(
                    iter(
                        data.pipeline(
                            data.tfrecords(pattern, index_dir=index_dir),
                            batch_size=_BATCH,
                            parse=tf.strings.length,
                            cache="none",
                        )
                    )
                ),
            )


if __name__ == "__main__":
    main()
