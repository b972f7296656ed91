"""Photos are upright, however the camera was held."""

import io
import itertools
import os
import random
import struct

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale import data
from tfscale.data.sources import exif
from tfscale.data.sources import image_source

_TAG, _SHORT, _LONG = 0x0112, 3, 4
# Of other tags, which stand before and after the orientation.
_MAKE, _RESOLUTION = 0x010F, 0x011A


def photo(height=48, width=80):
    """A picture that no turn or mirror leaves as it is; smooth, as JPEG is."""
    y, x = np.mgrid[:height, :width]
    picture = np.stack([x * 3, y * 4, (x + y) * 1.5], -1)
    return PIL.Image.fromarray(picture.astype(np.uint8))


def segment(order, orientation, *, kind=_SHORT, start=8, padding=b""):
    """An APP1 segment of a JPEG file with three tags."""
    byte_order = "<" if order == b"II" else ">"
    number = "H" if kind == _SHORT else "I"
    value = struct.pack(byte_order + number, orientation).ljust(4, b"\1")
    tags = [
        struct.pack(byte_order + "HHI", _MAKE, 2, 4) + b"tfs\0",
        struct.pack(byte_order + "HHI", _TAG, kind, 1) + value,
        # A fraction, which stands after the tags.
        struct.pack(byte_order + "HHII", _RESOLUTION, 5, 1, start + 42),
    ]
    text = order + struct.pack(byte_order + "HI", 42, start)
    text = text.ljust(start, b"\0") + struct.pack(byte_order + "H", len(tags))
    text = b"Exif\0\0" + text + b"".join(tags) + bytes(4)
    text += struct.pack(byte_order + "II", 72, 1) + padding
    return b"\xff\xe1" + struct.pack(">H", len(text) + 2) + text


def directories(order, *entries):
    """An APP1 segment with directories of `(tag, kind, number)`."""
    byte_order = "<" if order == b"II" else ">"
    text = order + struct.pack(byte_order + "HI", 42, 8)
    for number, each in enumerate(entries, 1):
        text += struct.pack(byte_order + "H", len(each))
        for tag, kind, value in each:
            format = "HHIHH" if kind == _SHORT else "HHII"
            value = (value, 0) if kind == _SHORT else (value,)
            text += struct.pack(byte_order + format, tag, kind, 1, *value)
        following = len(text) + 4 if number < len(entries) else 0
        text += struct.pack(byte_order + "I", following)
    text = b"Exif\0\0" + text
    return b"\xff\xe1" + struct.pack(">H", len(text) + 2) + text


def encoded(image, *segments):
    """A JPEG file with segments after its first one."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=100, subsampling=0)
    file = file.getvalue()
    length = int.from_bytes(file[4:6], "big") + 4
    return file[:length] + b"".join(segments) + file[length:]


def upright(contents):
    """As Pillow shows it, which reads EXIF, and turns, by code of its own."""
    tags = PIL.Image.open(io.BytesIO(contents)).getexif()
    # Each decoder of JPEG rounds in its own way.
    stored = PIL.Image.fromarray(tf.io.decode_jpeg(contents).numpy())
    file = io.BytesIO()
    stored.save(file, "PNG", exif=tags)
    return np.asarray(PIL.ImageOps.exif_transpose(PIL.Image.open(file)))


class ExifTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        order=(b"II", b"MM"), kind=(_SHORT, _LONG), start=(8, 90)
    )
    @pytest.mark.crossing(every=4)
    def test_each_orientation(self, order, kind, start):
        turned = set()
        traced = image_source._upright.experimental_get_tracing_count()
        for orientation in range(1, 9):
            contents = encoded(
                photo(), segment(order, orientation, kind=kind, start=start)
            )
            self.assertEqual(exif.orientation_of(contents), orientation)
            found = image_source.decode_image(contents, 3)
            self.assertAllEqual(found, upright(contents))
            turned.add(found.numpy().tobytes())
        self.assertLen(turned, 8)
        # Each string of Python had been traced anew.
        found = image_source._upright.experimental_get_tracing_count()
        self.assertLessEqual(found - traced, 1)

    def test_a_folder_of_all_of_them(self):
        folder = self.create_tempdir().full_path
        os.mkdir(folder + "/c")
        files = [
            encoded(photo(), segment(order, orientation))
            for order in (b"II", b"MM")
            for orientation in range(1, 9)
        ]
        for number, contents in enumerate(files):
            with open(f"{folder}/c/{number:02}.jpg", "wb") as file:
                file.write(contents)
        size = (24, 16)
        source = data.image_folder(folder, image_size=size)
        ((found, _),) = data.pipeline(
            source, batch_size=len(files), shuffle=False
        )
        wanted = [tf.image.resize(upright(one), size) for one in files]
        self.assertAllClose(found, tf.stack(wanted), atol=1e-3)

    @parameterized.parameters(1, 4)
    @pytest.mark.crossing(every=2)
    def test_other_channels(self, channels):
        contents = encoded(photo(), segment(b"MM", 6))
        found = image_source.decode_image(contents, channels)
        wanted = tf.cast(upright(contents), tf.float32)
        if channels == 1:
            wanted = tf.image.rgb_to_grayscale(wanted)
        else:
            edges = [[0, 0], [0, 0], [0, 1]]
            wanted = tf.pad(wanted, edges, constant_values=255)
        self.assertAllClose(tf.cast(found, tf.float32), wanted, atol=2)

    def test_files_without_an_orientation(self):
        little, thumbnail = segment(b"II", 6), encoded(photo(8, 8))
        files = {
            "no EXIF": encoded(photo()),
            "none of the eight": encoded(photo(), segment(b"II", 0)),
            "none of the eight, 9": encoded(photo(), segment(b"MM", 9)),
            "cut off": encoded(photo(), segment(b"MM", 6)[:20]),
            "tags beyond the end": encoded(
                photo(), little.replace(b"\x08\0\0\0", b"\xff\xff\xff\xff")
            ),
            "a comment with the word": encoded(
                photo(), b"\xff\xfe\0\x40" + little[4:].ljust(62, b"\0")
            ),
            "an empty file": b"",
            "a word": b"Exif\0\0",
            "a thumbnail": encoded(
                photo(), segment(b"MM", 1, padding=thumbnail)
            ),
        }
        for name, contents in files.items():
            with self.subTest(name):
                self.assertEqual(exif.orientation_of(contents), 1)

    def test_of_any_tags_in_any_order(self):
        # Most photos are told from few bytes to be upright; none other is.
        chance = random.Random(0)
        others = 0x0100, 0x010F, 0x0111, 0x0113, 0x011A, 0x0212, 0x8769
        for order, is_sorted, orientation in itertools.product(
            (b"II", b"MM"), (True, False), (None, *range(1, 9), 1, 6)
        ):
            tags = {tag: orientation or 6 for tag in others}
            if orientation:
                tags[_TAG] = orientation
            chosen = chance.sample(sorted(tags), chance.randint(1, len(tags)))
            chosen = sorted(chosen) if is_sorted else chosen
            entries = [(tag, _SHORT, tags[tag]) for tag in chosen]
            # A thumbnail behind them has tags too, one of them after 274.
            behind = [(_TAG, _SHORT, chance.choice([1, 6])), (0x201, _LONG, 9)]
            contents = encoded(photo(8, 8), directories(order, entries, behind))
            found = PIL.Image.open(io.BytesIO(contents)).getexif().get(_TAG, 1)
            with self.subTest(order=order, entries=entries, behind=behind):
                self.assertEqual(exif.orientation_of(contents), found)
                if is_sorted and found == 1 and _TAG in chosen:
                    self.assertFalse(exif.may_be_turned(contents))

    @parameterized.parameters("PNG", "GIF", "BMP")
    def test_other_formats_stay_as_they_are(self, kind):
        # Also with EXIF, of which PNG has a kind of its own.
        file = io.BytesIO()
        more = {"exif": segment(b"II", 6)[4:]} if kind == "PNG" else {}
        photo().save(file, kind, **more)
        found = image_source.decode_image(file.getvalue(), 3)
        self.assertEqual(found.shape, (48, 80, 3))

    @parameterized.parameters(*range(1, 9))
    @pytest.mark.crossing(every=4)
    def test_a_crop_is_that_of_the_upright_photo(self, orientation):
        contents = encoded(photo(), segment(b"II", orientation))
        plain = io.BytesIO()
        PIL.Image.fromarray(upright(contents)).save(plain, "PNG")
        arguments = (40, 40), (3, orientation)
        crops = [
            data.decode_random_crop(
                one, *arguments, aspect_ratio_range=(0.3, 0.5)
            )
            for one in (contents, plain.getvalue())
        ]
        self.assertAllClose(*crops, atol=1)

    def test_it_is_read_without_python(self):
        contents = encoded(photo(), segment(b"II", 8))
        function = tf.function(exif.orientation_of).get_concrete_function(
            tf.TensorSpec([], tf.string)
        )
        self.assertNotIn("PyFunc", str(function.graph.as_graph_def()))
        self.assertEqual(function(tf.constant(contents)), 8)


if __name__ == "__main__":
    absltest.main()
