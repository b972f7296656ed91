"""What the orientation in EXIF costs a photo: decodes per processor second.

    python -m benchmarks.input_pipeline.orientation    # about 2 minutes

Each is compared with TensorFlow's operations, which do not look for EXIF, in
turns in a random order. A turned photo is another one than TensorFlow's.
"""

import random
import statistics
import struct
import time

import tensorflow as tf

from benchmarks.input_pipeline import jpegs
from tfscale.data import decode_random_crop
from tfscale.data.sources.image_source import decode_image

_SIZE, _SEED = (224, 224), (1, 2)
_ROUNDS, _IMAGES = 51, 25


def decode(contents):
    return tf.io.decode_image(contents, 3, expand_animations=False)


def crop(contents):
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(contents),
        bounding_boxes=tf.zeros([1, 0, 4]),
        seed=_SEED,
        min_object_covered=0.0,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.08, 1.0),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    window = tf.concat([begin[:2], extent[:2]], 0)
    image = tf.image.decode_and_crop_jpeg(contents, window, 3)
    return tf.image.resize(image, _SIZE)


PAIRS = {
    "decoded": (decode, lambda contents: decode_image(contents, 3)),
    "decoded and resized": (
        lambda contents: tf.image.resize(decode(contents), _SIZE),
        lambda contents: decode_image(contents, 3, _SIZE),
    ),
    "a random crop": (
        crop,
        lambda contents: decode_random_crop(contents, _SIZE, _SEED),
    ),
}


def with_orientation(contents, orientation):
    """A JPEG file with EXIF after its first segment."""
    tags = struct.pack(">HHIHH", 274, 3, 1, orientation, 0)
    text = b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 1) + tags + bytes(4)
    segment = b"\xff\xe1" + struct.pack(">H", len(text) + 2) + text
    first = 4 + int.from_bytes(contents[4:6], "big")
    return contents[:first] + segment + contents[first:]


def ratios(functions):
    """Medians of the first function's seconds over those of each."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.autotune.enabled = False
    runs = {}
    for name, (function, contents) in functions.items():
        photos = tf.data.Dataset.from_tensors(contents).repeat().map(function)
        runs[name] = iter(photos.with_options(options))
    seconds = {name: [] for name in runs}
    for number in range(_ROUNDS + 1):
        for name in random.sample(list(runs), len(runs)):
            start = time.process_time()
            for _ in range(_IMAGES):
                next(runs[name])
            if number:  # the first ones trace
                seconds[name].append(time.process_time() - start)
    first = statistics.median(next(iter(seconds.values())))
    return {name: first / statistics.median(seconds[name]) for name in seconds}


def main():
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    photo = jpegs.picture(0)
    photos = {"no EXIF": photo}
    for orientation in (1, 3, 6):
        name = f"orientation {orientation}"
        photos[name] = with_orientation(photo, orientation)
    print(f"{len(photo)} bytes", "TensorFlow again", *photos, sep=" | ")
    for name, (theirs, ours) in PAIRS.items():
        functions = {"first": (theirs, photo), "again": (theirs, photo)}
        functions |= {key: (ours, each) for key, each in photos.items()}
        _, *found = ratios(functions).values()
        print(name, *(f"{each:.2f}" for each in found), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
