import os

import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale import data


def _photo(height, width):
    """Smooth in both directions, so that JPEG keeps it nearly as it is."""
    y, x = np.mgrid[:height, :width]
    return np.stack([y, x, y + x], -1).astype(np.uint8)


class RandomCropTest(tf.test.TestCase, parameterized.TestCase):
    def test_it_is_the_part_of_the_whole_that_png_gives(self):
        photo = _photo(60, 90)
        jpeg = tf.io.encode_jpeg(photo, quality=100)
        decoded = tf.io.decode_jpeg(jpeg)
        png = tf.io.encode_png(decoded)
        crop = tf.function(data.decode_random_crop)
        crops = []
        for seed in range(8):
            seed = tf.constant([3, seed])
            one = crop(jpeg, (16, 24), seed)
            self.assertAllEqual(one, crop(jpeg, (16, 24), seed))
            # Chroma at the edge of a part may be made of other neighbors.
            self.assertAllClose(one, crop(png, (16, 24), seed), atol=2.0)
            crops.append(one.numpy().tobytes())
        self.assertLen(set(crops), 8)

    def test_the_part_has_the_area_and_the_shape_that_are_asked_for(self):
        png = tf.io.encode_png(_photo(60, 90))
        for seed in range(8):
            crop = data.decode_random_crop(
                png,
                (10, 10),
                (3, seed),
                area_range=(0.25, 0.25),
                aspect_ratio_range=(1.5, 1.5),
            )
            # The first channel counts rows, the second columns: 30 and 45.
            self.assertAllClose(crop[-1, 0, 0] - crop[0, 0, 0], 27.0, atol=1)
            self.assertAllClose(crop[0, -1, 1] - crop[0, 0, 1], 40.5, atol=1)

    def test_in_a_pipeline_of_files_that_are_not_decoded(self):
        folder = self.create_tempdir().full_path
        os.mkdir(os.path.join(folder, "cats"))
        for number in range(4):
            encode = tf.io.encode_png if number % 2 else tf.io.encode_jpeg
            path = os.path.join(folder, "cats", f"{number}.png")
            tf.io.write_file(path, encode(_photo(20 + number, 30)))

        def augment(contents, label, seed):
            return data.decode_random_crop(contents, (8, 8), seed), label

        pipeline = data.pipeline(
            data.image_folder(folder, decode=False),
            batch_size=2,
            augment=augment,
        )
        first = list(pipeline.as_numpy_iterator())
        self.assertEqual([x.shape for x, _ in first], [(2, 8, 8, 3)] * 2)
        pipeline.position.assign(epoch=0, index=2)
        (again,) = pipeline.as_numpy_iterator()
        self.assertAllEqual(again[0], first[1][0])

        with open(path, "r+b") as file:
            file.truncate(os.path.getsize(path) // 2)
        pipeline = data.pipeline(
            data.image_folder(folder, decode=False), batch_size=4
        )
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, f"{path}.*on_damage="
        ):
            list(pipeline)

    def test_arguments(self):
        with self.assertRaisesRegex(ValueError, "`num_channels`.*=4"):
            data.decode_random_crop("", (8, 8), (0, 0), num_channels=4)
        with self.assertRaisesRegex(ValueError, "`image_size`.*decode=False"):
            data.image_folder("nothing", image_size=(8, 8), decode=False)


if __name__ == "__main__":
    absltest.main()
