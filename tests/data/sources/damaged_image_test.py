"""A damaged image is named, or skipped."""

import os

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests.data import record_files
from tfscale import data


class DamagedImageTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.create_tempdir().full_path
        noise = np.random.default_rng(0).integers(0, 256, [32, 32, 3])
        jpeg = tf.io.encode_jpeg(noise.astype("uint8")).numpy()
        png = tf.io.encode_png(noise.astype("uint8")).numpy()
        half, flipped = len(png) // 2, bytes([png[len(png) // 2] ^ 1])
        self.damaged = {
            "1.jpg": jpeg[: len(jpeg) // 2],
            "3.png": png[:half] + flipped + png[half + 1 :],
            "5.jpg": b"",
            "7.jpg": b"<html>not found</html>",
        }
        for number in range(8):
            name = f"{number}.jpg"
            if name not in self.damaged:
                record_files.write(
                    os.path.join(self.folder, "cats", name), jpeg
                )

    @parameterized.parameters("1.jpg", "3.png", "5.jpg", "7.jpg")
    @pytest.mark.crossing(every=4)
    def test_raises_with_the_name_of_the_file(self, name):
        path = os.path.join(self.folder, "cats", name)
        record_files.write(path, self.damaged[name])
        pipeline = data.pipeline(data.image_folder(self.folder), batch_size=8)
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, f"{path}.*on_damage="
        ):
            list(pipeline)

    def test_one_in_the_first_place_is_named_before_the_first_step(self):
        path = os.path.join(self.folder, "cats", "0.jpg")
        record_files.write(path, b"")
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, path):
            data.pipeline(data.image_folder(self.folder), batch_size=8)

    @parameterized.parameters((0, 0), (3, 2), (6, 4))  # the first, the last
    @pytest.mark.crossing(every=3)
    def test_a_jpeg_damaged_between_its_ends_is_named(self, number, at):
        # No error named it; those of the others before it were delivered.
        path = os.path.join(self.folder, "cats", f"{number}.jpg")
        pipeline = data.pipeline(
            data.image_folder(self.folder), batch_size=1, shuffle=False
        )
        self.assertEqual(int(pipeline.map(lambda x, y: y).cardinality()), 5)
        with open(path, "r+b") as file:
            file.seek(file.read().index(b"\xff\xc4") + 5)  # Huffman table
            file.write(b"\xff" * 10)
        batches = iter(pipeline)
        for _ in range(at):
            next(batches)
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, f"{path}.*on_damage="
        ):
            next(batches)
        with self.assertWarnsRegex(UserWarning, f"1 damaged.* of 5.*{path}"):
            data.image_folder(self.folder, on_damage="skip")

    @pytest.mark.crossing
    def test_what_parse_refuses_keeps_its_own_error(self):
        def parse(image, label):
            tf.debugging.assert_less(tf.cast(image[0, 0, 0], tf.int32), 256)
            with tf.control_dependencies(
                [
                    tf.debugging.Assert(
                        tf.shape(image)[0] == 32, ["of another height"]
                    )
                ]
            ):
                return tf.image.resize(image, [2, 2]), label

        path = os.path.join(self.folder, "cats", "4.jpg")
        record_files.write(
            path, tf.io.encode_jpeg(tf.zeros([8, 8, 3], tf.uint8)).numpy()
        )
        pipeline = data.pipeline(
            data.image_folder(self.folder), batch_size=2, parse=parse
        )
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, "of another height"
        ):
            list(pipeline)

    @parameterized.parameters("parse", "augment")
    @pytest.mark.crossing(every=2)
    def test_where_most_fail_not_all_are_tried_before_it_is_said(self, where):
        # A forgotten resize was said once an epoch had been decoded.
        folder = self.create_tempdir().full_path
        for size in range(1, 201):
            image = tf.zeros([size, 8, 3], tf.uint8)
            path = os.path.join(folder, "cats", f"{size:03}.jpg")
            record_files.write(path, tf.io.encode_jpeg(image).numpy())
        tried = []

        def count(image):
            tried.append(len(image))
            return image

        def parse(image, label):
            image = tf.numpy_function(count, [image], tf.uint8)
            return tf.ensure_shape(image, [None, 8, 3]), label

        def resized(image, label):
            return tf.image.resize(parse(image, label)[0], [1, 1]), label

        def augment(image, label, seed):
            del seed
            with tf.control_dependencies([tf.debugging.Assert(label > 0, [0])]):
                return tf.identity(image), label

        functions = (
            {"parse": parse}
            if where == "parse"
            else {"parse": resized, "augment": augment}
        )
        with self.assertWarnsRegex(UserWarning, "calls Python"):
            pipeline = data.pipeline(
                data.image_folder(folder), batch_size=8, **functions
            )
        with self.assertRaises(tf.errors.InvalidArgumentError):
            list(pipeline)
        self.assertLess(len(tried), 100)

    def test_webp_is_decoded_and_named_where_it_is_cut_off(self):
        # A red and a blue pixel, lossless.
        contents = bytes.fromhex(
            "524946461e000000574542505650384c110000"
            "002f010000000f10f3bffff31f0e32a2ff0100"
        )
        folder = self.create_tempdir().full_path
        path = os.path.join(folder, "dogs", "0.webp")
        os.mkdir(os.path.dirname(path))
        record_files.write(path, contents)
        image, _ = data.image_folder(folder).decode(contents, 0, path)
        self.assertAllEqual(image, [[[255, 0, 0], [0, 0, 255]]])
        record_files.write(path, contents[:-9])
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, path):
            data.pipeline(data.image_folder(folder), batch_size=1)

    def test_they_are_skipped_and_counted(self):
        for name, contents in self.damaged.items():
            record_files.write(
                os.path.join(self.folder, "cats", name), contents
            )
        with self.assertWarnsRegex(UserWarning, "4 damaged.* of 9.*1.jpg"):
            source = data.image_folder(self.folder, on_damage="skip")
        self.assertEqual((source.num_records, source.num_skipped), (5, 4))
        (batch,) = data.pipeline(source, batch_size=8)
        self.assertEqual(batch[0].shape, (5, 32, 32, 3))


if __name__ == "__main__":
    tf.test.main()
