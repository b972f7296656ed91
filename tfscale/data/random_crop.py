"""Random crops of encoded photos: only the pixels of the crop are decoded."""

import tensorflow as tf

from tfscale._internals import attributes
from tfscale.data.sources import exif
from tfscale.data.sources import image_source

# How other files begin.
_NO_JPEG = r"GIF|BM|RIFF|\CPNG"


def decode_random_crop(
    contents: tf.Tensor,
    size: tuple[int, int],
    seed: tf.Tensor,
    *,
    num_channels: int = 3,
    area_range: tuple[float, float] = (0.08, 1.0),
    aspect_ratio_range: tuple[float, float] = (3 / 4, 4 / 3),
) -> tf.Tensor:
    """A random crop of an encoded image, resized: Inception's augmentation.

    For `augment`, if a source gives encoded images, such as
    `image_folder(directory, decode=False)` or `webdataset`. Only the crop of a
    JPEG file is decoded, and upright; other images are decoded whole.

    Args:
        contents: Scalar string tensor, an image file.
        size: `(height, width)` of the result, in pixels.
        seed: Integer tensor of shape `(2,)`, the `seed` of `augment`.
        num_channels: Integer, 1 (gray) or 3 (RGB).
        area_range: Two floats, the least and greatest share of the image's
            area in the crop.
        aspect_ratio_range: Two floats, the least and greatest ratio of the
            crop's width to its height.

    Returns:
        A float32 tensor of shape `(height, width, num_channels)`, from 0 to
        255. If 10 trials find no such crop, it is of the whole image.

    Raises:
        ValueError: If `num_channels` is neither 1 nor 3.

    Source: Szegedy et al., "Going Deeper with Convolutions", section 6.

    Example:

    >>> photo = tf.io.encode_jpeg(tf.zeros([60, 80, 3], tf.uint8))
    >>> decode_random_crop(photo, (32, 32), seed=(1, 2)).shape
    TensorShape([32, 32, 3])
    """
    if num_channels not in (1, 3):
        raise ValueError(
            "`num_channels` must be 1 (gray) or 3 (RGB). Received: "
            f"num_channels={num_channels!r}."
        )

    def window(shape):
        begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            shape,
            bounding_boxes=tf.zeros([1, 0, 4]),
            seed=seed,
            min_object_covered=0.0,
            aspect_ratio_range=aspect_ratio_range,
            area_range=area_range,
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        return tf.concat([begin[:2], extent[:2]], 0)

    def plain():
        crop = window(tf.io.extract_jpeg_shape(contents))
        image = tf.image.decode_and_crop_jpeg(contents, crop, num_channels)
        return tf.image.resize(image, size)

    def turned():
        orientation = exif.orientation_of(contents)
        shape = exif.shown_shape(
            tf.io.extract_jpeg_shape(contents), orientation
        )
        crop = exif.stored_window(window(shape), shape, orientation)
        image = tf.image.decode_and_crop_jpeg(contents, crop, num_channels)
        # Resized, it has fewer pixels to turn.
        stored = exif.shown_shape([*size, num_channels], orientation)
        return exif.upright(tf.image.resize(image, stored[:2]), orientation)

    def of_another():
        image = image_source.decode_image(contents, num_channels)
        y, x, height, width = tf.unstack(window(tf.shape(image)))
        image = image[y : y + height, x : x + width]
        return tf.image.resize(image, size)

    def not_plain():
        is_turned = tf.io.is_jpeg(contents) & ~is_cmyk
        return tf.cond(is_turned, turned, of_another)

    if not tf.executing_eagerly():
        # Inlined, its operations would cost time for every file.
        options = attributes.NOT_INLINED
        not_plain = tf.function(
            not_plain, autograph=False, experimental_attributes=options
        )
    is_cmyk = tf.constant(False)
    if num_channels == 1:  # a crop of CMYK cannot be decoded as gray
        is_cmyk = image_source.is_cmyk(contents)
    is_other = exif.may_be_turned(contents, _NO_JPEG) | is_cmyk
    image = tf.cond(is_other, not_plain, plain)
    return tf.ensure_shape(image, [*size, num_channels])
