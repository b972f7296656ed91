"""Images of every format and number of channels, as every number asked for."""

import os
import warnings

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale import data

_MODES = {
    "bmp": ("L", "P", "RGB"),
    "gif": ("P",),
    "jpg": ("L", "RGB", "CMYK"),
    "png": ("1", "L", "LA", "P", "RGB", "RGBA"),
    "webp": ("RGB", "RGBA"),
}


class ImageTest(tf.test.TestCase, parameterized.TestCase):
    def _saved(self, image, name):
        folder = self.create_tempdir().full_path
        os.mkdir(folder + "/c")
        lossless = {"lossless": True} if name.endswith("webp") else {}
        image.save(f"{folder}/c/{name}", **lossless)
        return folder

    @parameterized.parameters(
        *(
            (suffix, mode, channels)
            for suffix, modes in _MODES.items()
            for mode in modes
            for channels in (1, 3, 4)
        )
    )
    @pytest.mark.crossing(every=48)
    def test_whole_images_are_decoded(self, suffix, mode, channels):
        # They were called damaged, and left out by on_damage="skip".
        shade = PIL.Image.fromarray(np.full([4, 6], 128, np.uint8))
        color = PIL.Image.merge("RGB", [shade, shade.point(lambda v: 7), shade])
        image = (shade if mode in ("1", "L", "LA") else color).convert(mode)
        folder = self._saved(image, f"a.{suffix}")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            source = data.image_folder(
                folder, num_channels=channels, on_damage="skip"
            )
        self.assertEqual(source.num_records, 1)
        ((found, _),) = data.pipeline(source, batch_size=1)
        wanted = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
        wanted = image.convert("RGBA").convert(wanted)
        wanted = np.asarray(wanted).reshape([4, 6, channels])
        # Luminance is rounded by each decoder in its own way.
        self.assertAllClose(
            tf.cast(found[0], tf.int32), wanted.astype(int), atol=2
        )
        self.assertEqual(found.dtype, tf.uint8)

    def test_alpha_is_kept_where_it_is_asked_for(self):
        image = PIL.Image.new("RGBA", (6, 4), (1, 2, 3, 77))
        folder = self._saved(image, "a.webp")
        source = data.image_folder(folder, num_channels=4)
        ((found, _),) = data.pipeline(source, batch_size=1)
        self.assertAllEqual(found[0, ..., 3], np.full([4, 6], 77))

    @parameterized.parameters(1, 3)
    def test_crops_of_images_of_other_channels(self, channels):
        image = PIL.Image.new("RGBA", (60, 40), (9, 9, 9, 77))
        path = self._saved(image, "a.webp") + "/c/a.webp"
        crop = data.decode_random_crop(
            tf.io.read_file(path), (8, 8), (1, 2), num_channels=channels
        )
        self.assertAllClose(crop, np.full([8, 8, channels], 9), atol=1)

    def test_crops_of_cmyk_are_gray(self):
        image = PIL.Image.new("CMYK", (60, 40), (0, 0, 0, 155))
        path = self._saved(image, "a.jpg") + "/c/a.jpg"
        crop = data.decode_random_crop(
            tf.io.read_file(path), (8, 8), (1, 2), num_channels=1
        )
        self.assertAllClose(crop, np.full([8, 8, 1], 100), atol=2)

    @parameterized.parameters(1, 3, 4)
    @pytest.mark.crossing(every=3)
    def test_an_animated_webp_is_named(self, channels):
        # TensorFlow wrote beyond the end of the image, and the process ended.
        first, second = (
            PIL.Image.new("RGB", (6, 4), n) for n in ("red", "blue")
        )
        folder = self.create_tempdir().full_path
        os.mkdir(folder + "/c")
        first.save(folder + "/c/a.webp", save_all=True, append_images=[second])
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, f"{folder}/c/a.webp"
        ):
            data.pipeline(
                data.image_folder(folder, num_channels=channels), batch_size=1
            )

    def test_the_first_picture_of_an_animation(self):
        first, second = (PIL.Image.new("L", (6, 4), n) for n in (0, 255))
        folder = self.create_tempdir().full_path
        os.mkdir(folder + "/c")
        first.save(folder + "/c/a.gif", save_all=True, append_images=[second])
        source = data.image_folder(folder, num_channels=1)
        ((found, _),) = data.pipeline(source, batch_size=1)
        self.assertAllEqual(found, np.zeros([1, 4, 6, 1]))


if __name__ == "__main__":
    absltest.main()
