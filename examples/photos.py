"""A small set of real pictures that needs no network."""

import numpy as np
import tensorflow as tf

from tfscale import data

_STRIDE = 8
_TRAIN_SHARE = 0.8


def patches(split, size=32):
    """Patches of a photograph, turned; the label is by how much.

    Telling which way up a picture is needs no label that a person gave, and
    is learned from shapes (Gidaris et al., "Unsupervised Representation
    Learning by Predicting Image Rotations", ICLR 2018). The photograph is the
    portrait of Grace Hopper that matplotlib brings, hence `tfscale[plot]`.

    Args:
        split: `"train"`, the left part of the photograph, or `"test"`, the
            rest; no pixel is in both.
        size: Integer, height and width of a patch.

    Returns:
        A source of `(image, label)`: uint8 of shape `(size, size, 3)` and an
        int32 scalar, the number of quarter turns.

    Example:

    >>> patches("test").num_records
    2592
    """
    from matplotlib import cbook  # an extra

    path = str(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False))
    photo = tf.io.decode_jpeg(tf.io.read_file(path), channels=3).numpy()
    border = int(photo.shape[1] * _TRAIN_SHARE)
    photo = photo[:, :border] if split == "train" else photo[:, border:]
    squares = [
        photo[top : top + size, left : left + size]
        for top in range(0, photo.shape[0] - size + 1, _STRIDE)
        for left in range(0, photo.shape[1] - size + 1, _STRIDE)
    ]
    turned = [np.rot90(p, turns) for p in squares for turns in range(4)]
    labels = np.tile(np.arange(4, dtype=np.int32), len(squares))
    return data.arrays(np.stack(turned), labels)
