"""The orientation of a photo, which a camera stores beside the pixels.

A camera stores pixels as its sensor reads them, and how it was held as one of
eight orientations in the EXIF of the JPEG file. To show the photo upright:

    orientation          1   2   3   4   5   6   7   8
    transpose it         .   .   .   .   x   x   x   x
    then reverse rows    .   .   x   x   .   .   x   x
    reverse columns      .   x   x   .   .   x   x   .
"""

import tensorflow as tf

# A segment of a JPEG file (JEITA CP-3451C, 4.5 and 4.6) has its marker, two
# bytes of its length, and `_EXIF` before the tags. It is the first segment, or
# comes after one of 18 bytes (JFIF).
_START_OF_IMAGE, _MARKER, _EXIF = b"\xff\xd8", b"\xff\xe1", b"Exif\0\0"
_TAG, _SHORT, _BYTES_PER_TAG = 274, 3, 12
# Patterns of `re2` for the first bytes of a file: one that has EXIF, and one
# whose orientation is 1. Tags are sorted; those before it are less than 274
# (little-endian, then big-endian). `re2` reads UTF-8, so a byte above 127 can
# only be any byte: `\C`.
_BEGINNING = 1024
_HAS_EXIF = r"\C{6,54}Exif\x00\x00"
_UPRIGHT = (
    rf"{_HAS_EXIF}(?:"
    r"II\*\x00\x08\x00\x00\x00\C\C"
    r"(?:(?:\C\x00|[\x00-\x11]\x01)\C{10})*"
    r"\x12\x01\x03\x00\x01\x00\x00\x00\x01\x00"
    r"|"
    r"MM\x00\*\x00\x00\x00\x08\C\C"
    r"(?:(?:\x00\C|\x01[\x00-\x11])\C{10})*"
    r"\x01\x12\x00\x03\x00\x00\x00\x01\x00\x01)"
)
_ROWS_REVERSED, _COLUMNS_REVERSED = (3, 4, 7, 8), (2, 3, 6, 7)


def may_be_turned(contents: tf.Tensor, others: str = "") -> tf.Tensor:
    """Whether EXIF may have an orientation but 1; a boolean scalar.

    Few operations, as each costs microseconds, and a small photo takes 1 ms.
    It is also true for files that begin with the pattern `others` of `re2`.
    """
    beginning = tf.strings.substr(contents, 0, _BEGINNING)
    found = f"{others}|{_HAS_EXIF}" if others else _HAS_EXIF
    return tf.not_equal(
        *(
            tf.strings.regex_full_match(beginning, rf"(?:{pattern})\C*")
            for pattern in (found, _UPRIGHT)
        )
    )


def orientation_of(contents: tf.Tensor) -> tf.Tensor:
    """The orientation of an image file, from 1 to 8, by default 1."""
    return tf.cond(
        may_be_turned(contents), lambda: _of_exif(contents), lambda: 1
    )


def _of_exif(contents):
    pieces = tf.strings.split([contents], _EXIF, maxsplit=1).flat_values
    before, tags = pieces[0], pieces[1]
    markers = tf.strings.substr(
        before, tf.stack([0, tf.strings.length(before) - 4]), [2, 2]
    )
    is_exif = tf.reduce_all(tf.equal(markers, [_START_OF_IMAGE, _MARKER]))
    length = tf.strings.length(tags)
    tags = tf.strings.join([tags, bytes(_BYTES_PER_TAG)])  # it may be cut off

    def read(is_little):
        def numbers(start, size, dtype):
            found = tf.strings.substr(tags, start, size)
            return tf.io.decode_raw(found, dtype, is_little)

        start = numbers(4, 4, tf.int32)[0]
        start = tf.clip_by_value(start, 0, length)
        count = tf.cast(numbers(start, 2, tf.uint16)[0], tf.int32)
        count = tf.minimum(count, (length - start) // _BYTES_PER_TAG)
        size = _BYTES_PER_TAG * count
        # In each row: the tag, its type, two of its length, two of its value.
        rows = tf.reshape(numbers(start + 2, size, tf.uint16), [-1, 6])
        rows = tf.cast(rows, tf.int32)
        low = rows[:, 4 if is_little else 5]  # of a longer number
        values = tf.where(rows[:, 1] == _SHORT, rows[:, 4], low)
        is_found = (rows[:, 0] == _TAG) & (values >= 1) & (values <= 8)
        is_found &= is_exif
        return tf.concat([tf.boolean_mask(values, is_found), [1]], 0)[0]

    is_little = tf.equal(tf.strings.substr(tags, 0, 2), b"II")
    # A branch would cost more than the few bytes.
    return tf.where(is_little, read(True), read(False))


def upright(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """An image `(height, width, channels)` as it is to be shown."""
    image = tf.cond(
        orientation > 4,
        lambda: tf.transpose(image, [1, 0, 2]),
        lambda: image,
    )
    return tf.reverse(image, tf.where(_reversed_dims(orientation))[:, 0])


def shown_shape(shape: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """The `(height, width, channels)` of a stored image when it is upright.

    And the other way around: that of the stored image.
    """
    return tf.where(orientation > 4, tf.gather(shape, [1, 0, 2]), shape)


def stored_window(
    window: tf.Tensor, shape: tf.Tensor, orientation: tf.Tensor
) -> tf.Tensor:
    """Where a window of an upright image is in the stored one.

    The window is `(top, left, height, width)`, the shape of the upright image
    `(height, width, channels)`.
    """
    begin, extent = window[:2], window[2:]
    begin = tf.where(
        _reversed_dims(orientation), shape[:2] - begin - extent, begin
    )
    order = tf.where(orientation > 4, [1, 0, 3, 2], [0, 1, 2, 3])
    return tf.gather(tf.concat([begin, extent], 0), order)


def _reversed_dims(orientation):
    """Whether rows and columns are reversed."""
    both = [_ROWS_REVERSED, _COLUMNS_REVERSED]
    return tf.reduce_any(tf.equal(orientation, both), axis=1)
