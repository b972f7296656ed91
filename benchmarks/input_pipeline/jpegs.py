"""JPEG files and TFRecord shards of them, made on the spot."""

import os

import numpy as np
import tensorflow as tf

NUM_CLASSES = 10
NUM_SHARDS = 8
SIDES = (375, 500)  # the median of ImageNet


def make(directory, num_images):
    """Writes `num_images` pictures as files and again as shards.

    Smooth shapes with some noise, so that they compress about as photographs
    do: 60 KB each.

    Args:
        directory: String, where `files/<class>/*.jpg` and `shards/*.tfrecord`
            are made, unless they are there.
        num_images: Integer.

    Returns:
        `(directory of the class folders, pattern of the shards)`.
    """
    folder = os.path.join(directory, "files")
    shards = os.path.join(directory, "shards")
    pattern = os.path.join(shards, "*.tfrecord")
    if os.path.isdir(shards):
        return folder, pattern
    pictures = [picture(number) for number in range(num_images)]
    for number, picture in enumerate(pictures):
        name = f"{number % NUM_CLASSES}/{number:05d}.jpg"
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(picture)
    os.makedirs(shards)
    for shard in range(NUM_SHARDS):
        path = os.path.join(shards, f"{shard}.tfrecord")
        with tf.io.TFRecordWriter(path) as writer:
            for number in range(shard, num_images, NUM_SHARDS):
                writer.write(_example(pictures[number], number % NUM_CLASSES))
    return folder, pattern


def picture(number):
    random = np.random.default_rng(number)
    coarse = random.uniform(0, 255, (24, 32, 3))
    picture = tf.image.resize(coarse, SIDES, method="bicubic").numpy()
    picture += random.normal(0, 6, picture.shape)
    picture = np.clip(picture, 0, 255).astype(np.uint8)
    return tf.io.encode_jpeg(picture, quality=90).numpy()


def _example(picture, label):
    features = {
        "image": tf.train.Feature(
            bytes_list=tf.train.BytesList(value=[picture])
        ),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(
        features=tf.train.Features(feature=features)
    ).SerializeToString()
