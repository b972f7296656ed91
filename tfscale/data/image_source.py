"""A folder of images with a subfolder for each class."""

import os

import tensorflow as tf

from tfscale.data import file_source

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")


def image_folder(
    directory, *, image_size=None, num_channels=3, class_names=None
):
    """Records are `(image, label)`: `directory/<class>/<file>`.

    Args:
        directory: String, also of a remote file system.
        image_size: `(height, width)`, to which images are resized
            (bilinear), as float32 from 0 to 255. By default they keep their
            own size and are uint8; then `parse` must give them one.
        num_channels: Integer, 1, 3 or 4.
        class_names: List of strings, the subfolders in the order of their
            labels. By default all of them, sorted.

    Returns:
        A source of images of shape `(height, width, num_channels)` and int32
        labels; its `class_names` are the labels' names.

    Raises:
        FileNotFoundError: If there is no subfolder, or one has no image.

    Example:

    >>> import os
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> os.mkdir(os.path.join(folder, "cats"))
    >>> picture = tf.io.encode_png(tf.zeros([2, 2, 3], tf.uint8))
    >>> tf.io.write_file(os.path.join(folder, "cats", "0.png"), picture)
    >>> image_folder(folder, image_size=(8, 8)).class_names
    ('cats',)
    """
    found = sorted(
        name.rstrip("/")
        for name in tf.io.gfile.listdir(directory)
        if tf.io.gfile.isdir(os.path.join(directory, name))
    )
    class_names = found if class_names is None else list(class_names)
    if not class_names:
        raise FileNotFoundError(
            "A folder of images has a subfolder for each class. Received: "
            f"{directory!r}, which has none."
        )
    paths, labels = [], []
    for label, name in enumerate(class_names):
        files = _images(os.path.join(directory, name))
        paths.extend(files)
        labels.extend([label] * len(files))
    return file_source.labelled(
        "image_folder",
        paths,
        labels,
        decode=_decoder(image_size, num_channels),
        class_names=tuple(class_names),
    )


def _images(folder):
    files = [
        os.path.join(folder, name)
        for name in sorted(tf.io.gfile.listdir(folder))
        if name.lower().endswith(_SUFFIXES)
    ]
    if not files:
        raise FileNotFoundError(
            f"Every class must have an image ({', '.join(_SUFFIXES)}). "
            f"Received: {folder!r}, which has none."
        )
    return files


def _decoder(image_size, num_channels):
    def decode(contents, label):
        image = tf.io.decode_image(
            contents, num_channels, expand_animations=False
        )
        if image_size is not None:
            image = tf.image.resize(image, image_size)
        return image, label

    return decode
