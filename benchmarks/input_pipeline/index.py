"""Seconds until large shards are indexed, and to the first batch, cold.

The shards are sparse files, of which only pages with headers exist: 3 GiB. To
measure the reading of headers and no disk, make them in memory.

python -m benchmarks.input_pipeline.index
python -m benchmarks.input_pipeline.index --directory=/dev/shm
"""

import os
import shutil
import tempfile
import time
from unittest import mock

import tensorflow as tf
from absl import app
from absl import flags

from tfscale import data

DIRECTORY = flags.DEFINE_string(
    "directory", None, "Where the shards are made; by default temporary."
)
_GIB = 1 << 30
_RECORD = 110_000
_BATCH = 32
_LATENCY = 0.02


def _shard(path, size):
    """A file of records of zeros, of which only headers are on the disk."""
    with tf.io.TFRecordWriter(path) as writer:
        writer.write(bytes(_RECORD))
    with open(path, "rb") as file:
        contents = file.read()
    header, end = contents[:12], contents[-4:]
    step = len(contents)
    count = size // step
    file = os.open(path, os.O_WRONLY)
    for number in range(1, count):
        os.pwrite(file, end + header, number * step - 4)
    os.pwrite(file, end, count * step - 4)
    os.close(file)


class _SlowFile(tf.io.gfile.GFile):
    """A file on a server that takes 20 ms for each answer."""

    def read(self, n=-1):
        time.sleep(_LATENCY)
        return super().read(n)


def _timed(text, function):
    begin, busy = time.perf_counter(), time.process_time()
    result = function()
    print(
        f"{text:40} {time.perf_counter() - begin:6.2f} s by the clock, "
        f"{time.process_time() - busy:6.2f} s of the processor",
        flush=True,
    )
    return result


def main(_):
    with tempfile.TemporaryDirectory(dir=DIRECTORY.value) as folder:
        large = os.path.join(folder, "large")
        _shard(large, 10 * _GIB)
        _timed("one shard of 10 GiB", lambda: data.tfrecords(large))
        os.remove(large)
        many = os.path.join(folder, "many")
        os.mkdir(many)
        for number in range(1000):
            _shard(os.path.join(many, f"{number}.small"), 4 << 20)
        _timed("1,000 shards of 4 MiB", lambda: data.tfrecords(f"{many}/*"))
        with mock.patch.object(tf.io.gfile, "GFile", _SlowFile):
            _timed(
                "the same, each answer takes 20 ms",
                lambda: data.tfrecords(f"file://{many}/*"),
            )
        shutil.rmtree(many)
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
    app.run(main)
