"""The same task in every way that is compared: JPEG to batches of floats.

Read, decode, resize to `SIZE`, flip at random, scale; shuffled, batches of
`BATCH_SIZE`. Nothing is cached, so that every epoch does all the work.
"""

import itertools
import os

import keras
import tensorflow as tf

from tfscale import data

SIZE = (224, 224)
BATCH_SIZE = 64
AUTOTUNE = tf.data.AUTOTUNE
GRID = tuple(itertools.product((2, 4, 8), (1, 2, 4)))  # calls, batches ahead

_FEATURES = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "label": tf.io.FixedLenFeature([], tf.int64),
}


def _decode(contents, label):
    image = tf.io.decode_jpeg(contents, channels=3)
    return tf.image.resize(image, SIZE), label


def _decode_example(record):
    example = tf.io.parse_single_example(record, _FEATURES)
    return _decode(example["image"], example["label"])


def _flip(image, label):
    return tf.image.random_flip_left_right(image) / 255.0, label


def _flip_stateless(image, label, seed):
    image = tf.image.stateless_random_flip_left_right(image, seed)
    return image / 255.0, label


def _from_path(path):
    label = tf.strings.to_number(tf.strings.split(path, os.sep)[-2], tf.int64)
    return _flip(*_decode(tf.io.read_file(path), label))


def _paths(folder):
    return tf.data.Dataset.list_files(
        os.path.join(folder, "*", "*.jpg"), shuffle=True
    )


def naive(folder):
    """What a first attempt looks like: nothing parallel, nothing ahead."""
    return _paths(folder).map(_from_path).batch(BATCH_SIZE)


def hand_tuned(folder, num_calls, num_ahead):
    """One point of the grid."""
    records = _paths(folder).map(_from_path, num_parallel_calls=num_calls)
    return records.batch(BATCH_SIZE).prefetch(num_ahead)


def autotune_files(folder):
    """Plain tf.data with AUTOTUNE wherever it can be, on files."""
    records = _paths(folder).map(_from_path, num_parallel_calls=AUTOTUNE)
    return records.batch(BATCH_SIZE).prefetch(AUTOTUNE)


def autotune_shards(pattern):
    """Plain tf.data with AUTOTUNE wherever it can be, on TFRecord shards."""
    records = tf.data.Dataset.list_files(pattern, shuffle=True).interleave(
        tf.data.TFRecordDataset, num_parallel_calls=AUTOTUNE
    )
    records = records.shuffle(1024).map(
        lambda record: _flip(*_decode_example(record)),
        num_parallel_calls=AUTOTUNE,
    )
    return records.batch(BATCH_SIZE).prefetch(AUTOTUNE)


def keras_directory(folder):
    """`keras.utils.image_dataset_from_directory`, augmented after batching."""
    batches = keras.utils.image_dataset_from_directory(
        folder, image_size=SIZE, batch_size=BATCH_SIZE, verbose=False
    )
    return batches.map(_flip, num_parallel_calls=AUTOTUNE).prefetch(AUTOTUNE)


def tfscale_files(folder):
    """This package on files."""
    return data.pipeline(
        data.image_folder(folder),
        batch_size=BATCH_SIZE,
        parse=lambda image, label: (tf.image.resize(image, SIZE), label),
        augment=_flip_stateless,
        cache="none",
    )


def tfscale_shards(pattern):
    """This package on TFRecord shards."""
    return data.pipeline(
        data.tfrecords(pattern),
        batch_size=BATCH_SIZE,
        parse=_decode_example,
        augment=_flip_stateless,
        cache="none",
    )


def grid(folder):
    """A dict from name to a dataset for each point of the grid."""
    return {
        f"grid, {calls} calls, {ahead} ahead": hand_tuned(folder, calls, ahead)
        for calls, ahead in GRID
    }


def others(folder, pattern):
    """A dict from name to a dataset for everything else."""
    return {
        "naive": naive(folder),
        "AUTOTUNE, files": autotune_files(folder),
        "AUTOTUNE, TFRecord": autotune_shards(pattern),
        "Keras image_dataset_from_directory": keras_directory(folder),
        "tfscale, files": tfscale_files(folder),
        "tfscale, TFRecord": tfscale_shards(pattern),
    }
