"""A folder of images with a subfolder for each class."""

import os
import warnings
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.data import single_device
from tfscale.data.sources import exif
from tfscale.data.sources import file_source
from tfscale.data.sources.source import IndexedSource
from tfscale.data.sources.source import check_on_damage

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")
# How files begin whose channels TensorFlow does not convert.
_CONVERTED = "GIF|BM|RIFF"
# A WebP file whose flags say that it is an animation (RFC 9649, 2.7.1): 2, and
# any of the others, which are below 64.
_FLAGS = "".join(rf"\x{flags:02x}" for flags in range(64) if flags & 2)
_ANIMATED_WEBP = rf"RIFF\C{{4}}WEBPVP8X\C{{4}}[{_FLAGS}]"
_JPEG = b"\xff\xd8"  # ITU-T T.81, table B.1: start of image


def image_folder(
    directory: str | os.PathLike[str],
    *,
    image_size: tuple[int, int] | None = None,
    num_channels: int = 3,
    class_names: Sequence[str] | None = None,
    on_damage: str = "raise",
    decode: bool = True,
) -> IndexedSource:
    """Records are `(image, label)`: `directory/<class>/<file>`.

    Args:
        directory: String, also of a remote file system.
        image_size: `(height, width)`, to which images are resized
            (bilinear), as float32 from 0 to 255. By default they keep their
            own size and are uint8; then `parse` must give them one.
        num_channels: Integer, 1 (gray), 3 (RGB) or 4 (RGBA), to which every
            image is converted: gray is the luminance, alpha is left out or
            255. Of an animated GIF the first picture counts; an animated WebP
            cannot be decoded, nor a BMP of less than 8 bits. A photo is
            upright: the orientation in the EXIF of a JPEG file is applied,
            which Keras' `image_dataset_from_directory` does not.
        class_names: List of strings, the subfolders in the order of their
            labels. By default all of them, sorted, but those that begin with
            a dot.
        on_damage: `"raise"`, when an image cannot be decoded, with the file's
            name, or `"skip"`: such images are left out, and counted in a
            warning. That is decided before the first step, by decoding
            everything once. Of a JPEG file that is damaged between its ends
            the decoder makes some picture where it can, which is not found.
        decode: Whether images are decoded. Else they are scalar strings, the
            files' contents, for `decode_random_crop` in `augment`.

    Returns:
        A source of images of shape `(height, width, num_channels)` and int32
        labels; its `class_names` are the labels' names.

    Raises:
        FileNotFoundError: If there is no subfolder, or one has no image.
        ValueError: If another argument is not as above.

    Example:

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> picture = tf.io.encode_png(tf.zeros([2, 2, 3], tf.uint8))
    >>> tf.io.write_file(folder + "/cats/0.png", picture)
    >>> image_folder(folder, image_size=(8, 8)).class_names
    ('cats',)
    """
    check_on_damage(on_damage)
    _check(image_size, num_channels)
    if image_size is not None and not decode:
        raise ValueError(
            "`image_size` needs decoded images. Received: "
            f"image_size={image_size!r} with decode={decode!r}. Pass the size "
            "to `decode_random_crop`."
        )
    if image_size is not None:
        height, width = image_size
        image_size = int(height), int(width)
    directory = os.fspath(directory)
    if class_names is None:
        class_names = _subfolders(directory)
    files = [
        (path, label)
        for label, name in enumerate(class_names)
        for path in _images(os.path.join(directory, name))
    ]
    skipped = 0
    if on_damage == "skip":
        whole = _whole(files, num_channels)
        skipped, files = len(files) - len(whole), whole
    decoder, quick_decoder = _checker(num_channels), None
    if decode:
        decoder, quick_decoder = _decoders(image_size, num_channels)
    return file_source.labeled(
        "image_folder",
        files,
        decode=decoder,
        quick_decode=quick_decoder,
        class_names=tuple(class_names),
        num_skipped=skipped,
    )


def _check(image_size, num_channels):
    sizes = () if image_size is None else tuple(np.ravel(image_size))
    if image_size is not None and (
        len(sizes) != 2
        or not all(isinstance(n, np.integer) and n > 0 for n in sizes)
    ):
        raise ValueError(
            "`image_size` must be (height, width) in pixels or None. Received: "
            f"image_size={image_size!r}."
        )
    if num_channels not in (1, 3, 4):
        raise ValueError(
            "`num_channels` must be 1 (gray), 3 (RGB) or 4 (RGBA). Received: "
            f"num_channels={num_channels!r}."
        )


def _subfolders(directory):
    if not tf.io.gfile.isdir(directory):
        raise FileNotFoundError(
            f"`directory` must be a directory. Received: {directory!r}."
        )
    names = sorted(
        name.rstrip("/")
        for name in tf.io.gfile.listdir(directory)
        if not name.startswith(".")
        and tf.io.gfile.isdir(os.path.join(directory, name))
    )
    if not names:
        raise FileNotFoundError(
            "`directory` must have a subfolder for each class. Received: "
            f"{directory!r}, which has none."
        )
    return names


def _images(folder):
    files = [
        os.path.join(parent, name)
        for parent, _, names in tf.io.gfile.walk(folder)
        for name in names
        if name.lower().endswith(_SUFFIXES) and not name.startswith(".")
    ]
    if not files:
        raise FileNotFoundError(
            f"Every class must have an image ({', '.join(_SUFFIXES)}). "
            f"Received: {folder!r}, which has none."
        )
    return sorted(files)


def decode_image(
    contents: tf.Tensor,
    num_channels: int,
    size: tuple[int, int] | None = None,
) -> tf.Tensor:
    """An upright image `(height, width, num_channels)`.

    It is uint8, or float32 of a `size` (bilinear). TensorFlow converts
    channels of JPEG and PNG only, none to alpha, and none of CMYK to gray.
    """
    contents = tf.convert_to_tensor(contents)  # else each is traced anew
    if num_channels == 4:
        image = _upright(contents, num_channels, size)
    else:
        is_other = exif.may_be_turned(contents, _CONVERTED)
        if num_channels == 1:
            is_other |= is_cmyk(contents)
        image = tf.cond(
            is_other,
            lambda: _upright(contents, num_channels, size),
            lambda: _resized(_plain(contents, num_channels), size),
        )
    return tf.ensure_shape(image, [*(size or (None, None)), num_channels])


def _plain(contents, num_channels):
    """An image as TensorFlow decodes it."""
    return tf.io.decode_image(contents, num_channels, expand_animations=False)


def _resized(image, size):
    return image if size is None else tf.image.resize(image, size)


# Inlined, its operations would cost time for every file.
@tf.function(autograph=False, experimental_attributes=attributes.NOT_INLINED)
def _upright(contents, num_channels, size):
    """An image that is converted, or turned."""
    if num_channels == 4:
        image = _converted(contents, num_channels)
    else:
        is_converted = _begins(contents, _CONVERTED)
        if num_channels == 1:
            is_converted |= is_cmyk(contents)
        image = tf.cond(
            is_converted,
            lambda: _converted(contents, num_channels),
            lambda: _plain(contents, num_channels),
        )
    orientation = exif.orientation_of(contents)
    if size is not None:  # fewer pixels are turned
        stored = exif.shown_shape([*size, num_channels], orientation)
        image = _resized(image, stored[:2])
    return exif.upright(image, orientation)


def _converted(contents, num_channels):
    """An image, decoded in its own channels."""
    image = tf.cond(
        _begins(contents, _ANIMATED_WEBP),
        # It is an error: in its own channels, TensorFlow 2.21 writes beyond
        # the end of the image.
        lambda: _plain(contents, 3),
        lambda: tf.cond(
            _begins(contents, "BM"),
            lambda: _of_bmp(contents),
            lambda: _plain(contents, 0),
        ),
    )
    is_gray = tf.shape(image)[2] < 3
    colors = tf.where(is_gray, 1, 3)
    color, alpha = image[..., :colors], image[..., colors:]
    if num_channels == 1:
        gray = tf.image.rgb_to_grayscale
        return tf.cond(
            is_gray,
            lambda: color,
            lambda: gray(tf.ensure_shape(color, [None, None, 3])),
        )
    color = tf.repeat(color, tf.where(is_gray, 3, 1), axis=2)
    if num_channels == 3:
        return color
    opaque = tf.fill(tf.shape(image[..., :1]), tf.constant(255, tf.uint8))
    return tf.concat([color, alpha, opaque], axis=2)[..., :4]


def _of_bmp(contents):
    """An image of a BMP file; TensorFlow decodes numbers of a palette's colors.

    The palette, of blue, green, red and 0, is between the header, whose size is
    at 14, and the pixels, whose offset is at 10.
    """
    image = _plain(contents, 0)

    def number(at):
        return tf.io.decode_raw(tf.strings.substr(contents, at, 4), tf.int32)[0]

    def colored():
        begin, end = 14 + number(14), number(10)
        size = (end - begin) // 4 * 4
        palette = tf.strings.substr(contents, begin, size)
        colors = tf.reshape(tf.io.decode_raw(palette, tf.uint8), [-1, 4])
        numbers = tf.cast(image[..., 0], tf.int32)
        return tf.gather(colors[:, 2::-1], numbers)

    return tf.cond(tf.shape(image)[2] == 1, colored, lambda: image)


def _begins(contents, pattern):
    """Whether a file begins with a pattern of `re2`."""
    return tf.strings.regex_full_match(contents, rf"(?:{pattern})\C*")


def is_cmyk(contents: tf.Tensor) -> tf.Tensor:
    """Whether a file is a JPEG of four channels: a boolean scalar."""
    return tf.cond(
        tf.strings.substr(contents, 0, 2) == _JPEG,
        lambda: tf.io.extract_jpeg_shape(contents)[2] == 4,
        lambda: tf.constant(False),
    )


def _is_jpeg(contents):
    last = tf.maximum(tf.strings.length(contents) - 2, 0)
    ends = tf.strings.substr(contents, tf.stack([0, last]), [2, 2])
    return tf.reduce_all(tf.equal(ends, [_JPEG, b"\xff\xd9"]))


def _decoded(contents, num_channels, size=None):
    """The image, or an image of height 0 if the file is damaged.

    The error of the decoder does not name the file. A dataset can ignore
    errors, and costs 0.15 ms.
    """
    image = single_device.map_on_host(
        tf.data.Dataset.from_tensors(contents),
        lambda contents: decode_image(contents, num_channels, size),
    ).ignore_errors()
    dtype = image.element_spec.dtype
    none = tf.zeros([0, *(size or (0,))[1:], num_channels], dtype)
    image = image.concatenate(tf.data.Dataset.from_tensors(none)).take(1)
    return image.get_single_element()


def _decoders(size, num_channels):
    """A decoder whose errors name the file, and a quick one."""

    def decode(contents, label, path):
        image = _decoded(contents, num_channels, size)
        with tf.control_dependencies([_check_decoded(tf.size(image), path)]):
            image = tf.identity(image)
        return tf.ensure_shape(
            image, [*(size or (None, None)), num_channels]
        ), label

    def quick_decode(contents, label, path):
        del path
        return decode_image(contents, num_channels, size), label

    return decode, quick_decode


def _checker(num_channels):
    """A function that checks images, and leaves them encoded."""

    def check(contents, label, path):
        size = tf.cond(
            _is_jpeg(contents),
            lambda: 1,
            lambda: tf.size(_decoded(contents, num_channels)),
        )
        with tf.control_dependencies([_check_decoded(size, path)]):
            return tf.identity(contents), label

    return check


def _check_decoded(size, path):
    return tf.raw_ops.Assert(
        condition=size > 0,
        data=[
            "An image cannot be decoded: it is damaged, or of an unknown "
            "format. Received: file",
            path,
            "To leave damaged images out, use on_damage='skip'.",
        ],
    )


def _whole(files, num_channels):
    """The files that can be decoded; warns of the others."""

    def is_whole(path):
        return tf.size(_decoded(tf.io.read_file(path), num_channels)) > 0

    paths = [path for path, _ in files]
    found = tf.data.Dataset.from_tensor_slices(paths).map(
        is_whole, num_parallel_calls=tf.data.AUTOTUNE
    )
    is_damaged = ~np.fromiter(found.as_numpy_iterator(), bool, len(files))
    damaged = np.flatnonzero(is_damaged)
    if damaged.size:
        warnings.warn(
            f"{damaged.size} damaged images of {len(files)} are left out, the "
            f"first of them {paths[damaged[0]]}.",
            stacklevel=3,
        )
    return [file for file, bad in zip(files, is_damaged) if not bad]
