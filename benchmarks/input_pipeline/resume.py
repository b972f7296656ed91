"""Seconds to the first batch of a resume at the end of 100,000 records.

python -m benchmarks.input_pipeline.resume
"""

import os
import statistics
import tempfile
import time

import numpy as np
import tensorflow as tf

from tfscale import data

_RECORDS = 100_000
_BATCH = 32


def seconds(pipeline):
    """How long the last batch of an epoch takes, from the position on."""
    times = []
    for _ in range(5):
        pipeline.position.assign(index=_RECORDS // _BATCH * _BATCH - _BATCH)
        begin = time.perf_counter()
        list(pipeline)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main():
    with tempfile.TemporaryDirectory() as folder:
        for shard in range(4):
            path = os.path.join(folder, f"{shard}.tfrecord")
            with tf.io.TFRecordWriter(path) as writer:
                for _ in range(_RECORDS // 4):
                    writer.write(b"record")
        for name, source in (
            ("arrays", data.arrays(np.arange(_RECORDS))),
            ("tfrecords", data.tfrecords(os.path.join(folder, "*"))),
        ):
            pipeline = data.pipeline(source, batch_size=_BATCH, cache="none")
            print(f"{name:10} {seconds(pipeline):.3f} s")


if __name__ == "__main__":
    main()
