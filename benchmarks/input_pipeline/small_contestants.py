"""Tasks of small records, and who does them: functions that begin an epoch."""

import os

import numpy as np
import tensorflow as tf

from tfscale import data

BATCH_SIZE = 256
RECORD_BYTES = 256
NUM_FLOATS = 20
NUM_SHARDS = 8
AUTOTUNE = tf.data.AUTOTUNE
_FEATURES = {
    "x": tf.io.FixedLenFeature([NUM_FLOATS], tf.float32),
    "y": tf.io.FixedLenFeature([], tf.int64),
}


def _write(folder, name, count, record):
    for shard in range(NUM_SHARDS):
        path = os.path.join(folder, f"{name}-{shard}.tfrecord")
        with tf.io.TFRecordWriter(path) as writer:
            for number in range(shard, count, NUM_SHARDS):
                writer.write(record(number))
    return os.path.join(folder, f"{name}-*.tfrecord")


def _by_hand(pattern, count, parse):
    """The best that is known: many files, all shuffled, parsed in batches."""
    files = tf.data.Dataset.list_files(pattern, shuffle=True)
    records = files.interleave(
        tf.data.TFRecordDataset,
        num_parallel_calls=AUTOTUNE,
        deterministic=False,
    )
    batches = records.shuffle(count).batch(BATCH_SIZE)
    batches = batches.map(parse, num_parallel_calls=AUTOTUNE)
    return batches.prefetch(AUTOTUNE)


def _tfscale(source, **kwargs):
    kwargs = {"cache": "none", "shuffle": 10**9, **kwargs}
    return data.pipeline(source, batch_size=BATCH_SIZE, **kwargs)


def _decode(record):
    return tf.io.decode_raw(record, tf.uint8)


def _bytes(folder, count):
    random = np.random.default_rng(0)
    pattern = _write(
        folder, "bytes", count, lambda _: random.bytes(RECORD_BYTES)
    )
    hand = _by_hand(pattern, count, _decode)
    ours = _tfscale(data.tfrecords(pattern), parse_batch=_decode)
    return {"tfscale": lambda: ours, "by hand": lambda: hand}


def example(number):
    """A serialized `tf.train.Example`, bytes."""
    features = {
        "x": tf.train.Feature(
            float_list=tf.train.FloatList(value=np.arange(NUM_FLOATS) * number)
        ),
        "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
    }
    return tf.train.Example(
        features=tf.train.Features(feature=features)
    ).SerializeToString()


def _examples(folder, count):
    pattern = _write(folder, "example", count, example)
    hand = _by_hand(pattern, count, lambda r: tf.io.parse_example(r, _FEATURES))
    ours = _tfscale(
        data.tfrecords(pattern),
        parse_batch=lambda r: tf.io.parse_example(r, _FEATURES),
    )
    return {"tfscale": lambda: ours, "by hand": lambda: hand}


def _csv(folder, count):
    names = [f"c{n}" for n in range(8)]
    for shard in range(NUM_SHARDS):
        with open(os.path.join(folder, f"{shard}.csv"), "w") as file:
            file.write(",".join(names) + "\n")
            for number in range(shard, count, NUM_SHARDS):
                file.write(",".join([str(number / 7)] * len(names)) + "\n")
    pattern = os.path.join(folder, "*.csv")
    files = tf.data.Dataset.list_files(pattern, shuffle=True)
    lines = files.interleave(
        lambda path: tf.data.TextLineDataset(path).skip(1),
        num_parallel_calls=AUTOTUNE,
        deterministic=False,
    )
    defaults = [0.0] * len(names)
    hand = lines.shuffle(count).batch(BATCH_SIZE)
    hand = hand.map(
        lambda batch: dict(zip(names, tf.io.decode_csv(batch, defaults))),
        num_parallel_calls=AUTOTUNE,
    ).prefetch(AUTOTUNE)
    ours = _tfscale(data.csv(pattern, dtypes=dict.fromkeys(names, "float32")))
    return {"tfscale": lambda: ours, "by hand": lambda: hand}


def _arrays(folder, count):
    del folder
    x = np.random.default_rng(0).normal(size=(count, 64)).astype("float32")
    y = np.arange(count)
    hand = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(count)
    hand = hand.batch(BATCH_SIZE).prefetch(AUTOTUNE)
    ours = _tfscale(data.arrays(x, y))
    return {"tfscale": lambda: ours, "by hand": lambda: hand}


def _tokens(folder, count):
    del folder
    length = 64
    ids = np.arange(count * length + 1, dtype=np.int32)

    windows = np.lib.stride_tricks.sliding_window_view(ids, length + 1)
    hand = tf.data.Dataset.from_tensor_slices(windows[::length].copy())
    hand = hand.shuffle(count).batch(BATCH_SIZE)
    hand = hand.map(
        lambda w: (w[:, :-1], w[:, 1:]), num_parallel_calls=AUTOTUNE
    ).prefetch(AUTOTUNE)
    ours = _tfscale(data.tokens(ids, length))
    return {"tfscale": lambda: ours, "by hand": lambda: hand}


def _cached(folder, count):
    random = np.random.default_rng(0)
    pattern = _write(
        folder, "cached", count, lambda _: random.bytes(RECORD_BYTES)
    )
    files = tf.data.Dataset.list_files(pattern, shuffle=False)
    hand = files.interleave(tf.data.TFRecordDataset).map(_decode).cache()
    hand = hand.shuffle(count).batch(BATCH_SIZE).prefetch(AUTOTUNE)
    source = data.tfrecords(pattern)
    memory = _tfscale(source, parse_batch=_decode, cache="memory")
    file = _tfscale(
        source,
        parse_batch=_decode,
        cache="file",
        cache_dir=os.path.join(folder, "cache"),
    )
    return {
        "tfscale": lambda: memory,
        "tfscale, file": lambda: file,
        "by hand": lambda: hand,
    }


TASKS = {
    "bytes": _bytes,
    "examples": _examples,
    "csv": _csv,
    "arrays": _arrays,
    "tokens": _tokens,
    "cached": _cached,
}
