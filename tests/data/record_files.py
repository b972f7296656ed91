"""Files of records that tests write, and damage."""

import os

import numpy as np
import tensorflow as tf


def shard(folder, name="0.tfrecord", count=10):
    path = os.path.join(folder, name)
    with tf.io.TFRecordWriter(path) as writer:
        for number in range(count):
            writer.write(b"record %02d" % number)
    return path


def write(path, contents):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(contents)


RECORD = 16 + len("record 00")


def damage(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def values(pipeline):
    return np.concatenate(list(pipeline.as_numpy_iterator())).tolist()
