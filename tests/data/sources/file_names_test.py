"""Which files sources read, and what is said of those they do not."""

import functools
import os
import pathlib

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.data import record_files
from tfscale import data


class FilesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("files", "tfrecords", "text", "csv")
    def test_no_file_matches(self, name):
        arguments = {
            "files": {},
            "tfrecords": {},
            "text": {"length": 3},
            "csv": {"dtypes": {}},
        }[name]
        with self.assertRaisesRegex(FileNotFoundError, "nothing-here"):
            getattr(data, name)("/nothing-here/*.x", **arguments)

    @parameterized.parameters("memory://a/b", "http://localhost:1/b")
    def test_a_file_system_that_tensorflow_does_not_know(self, path):
        for build in (data.files, data.parquet, data.array_records):
            with self.assertRaisesRegex(ValueError, f"tf.io.gfile.*{path}"):
                build(path)

    @parameterized.parameters(5, b"/tmp/a")
    def test_what_is_no_pattern(self, pattern):
        with self.assertRaisesRegex(TypeError, f"string or path.*{pattern}"):
            data.files(pattern)

    def test_a_directory_instead_of_its_files(self):
        folder = self.create_tempdir().full_path
        for build in (data.tfrecords, data.json_lines, data.webdataset):
            with self.assertRaisesRegex(FileNotFoundError, f"'{folder}/\\*'"):
                build(folder)

    def test_a_name_with_brackets_is_that_file(self):
        # It was a pattern only, of another file or of none.
        folder = self.create_tempdir().full_path
        for name in ("run[1].txt", "run1.txt", "run[2].txt"):
            tf.io.write_file(os.path.join(folder, name), name)
        for name, found in (
            ("run[1].txt", ["run[1].txt"]),
            ("run[2].txt", ["run[2].txt"]),
            ("run[13].txt", ["run1.txt"]),
        ):
            source = data.files(os.path.join(folder, name))
            pipeline = data.pipeline(source, batch_size=9)
            ((contents, _),) = pipeline.as_numpy_iterator()
            self.assertEqual([c.decode() for c in contents], found)

    def test_folders_of_any_depth_are_refused(self):
        # Files that lay deeper or higher were left out.
        folder = self.create_tempdir().full_path
        tf.io.write_file(os.path.join(folder, "a/b.txt"), "text")
        pattern = os.path.join(folder, "**", "*.txt")
        for build in (data.files, data.tfrecords):
            with self.assertRaisesRegex(ValueError, "for each level"):
                build(pattern)

    def test_a_class_without_images(self):
        folder = self.create_tempdir().full_path
        with self.assertRaisesRegex(FileNotFoundError, "subfolder"):
            data.image_folder(folder)
        os.mkdir(os.path.join(folder, "cats"))
        with self.assertRaisesRegex(FileNotFoundError, "cats"):
            data.image_folder(folder)

    def test_images_of_different_shapes_are_named(self):
        folder = self.create_tempdir().full_path
        os.mkdir(os.path.join(folder, "cats"))
        for number, height in enumerate((4, 4, 5)):
            image = tf.zeros([height, 4, 3], tf.uint8)
            path = os.path.join(folder, "cats", f"{number}.png")
            tf.io.write_file(path, tf.io.encode_png(image))
        pipeline = data.pipeline(data.image_folder(folder), batch_size=3)
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError,
            r"one shape.*Record\] \[2\] \[has shape\] \[5 4 3\].*\[4 4 3\]",
        ):
            list(pipeline)

    @parameterized.parameters(
        {"image_size": 32},
        {"image_size": (32, 32, 3)},
        {"num_channels": 2},
        {"on_damage": "ignore"},
    )
    def test_images_as_they_cannot_be(self, **kwargs):
        (name,) = kwargs
        with self.assertRaisesRegex(ValueError, f"`{name}`.*{name}="):
            data.image_folder(self.create_tempdir().full_path, **kwargs)

    def test_a_folder_of_images_that_is_not_there(self):
        with self.assertRaisesRegex(FileNotFoundError, "/nothing-here"):
            data.image_folder("/nothing-here")

    def test_hidden_folders_are_no_classes_and_deeper_ones_are_searched(self):
        folder = self.create_tempdir().full_path
        picture = tf.io.encode_png(tf.zeros([2, 2, 3], tf.uint8)).numpy()
        for path in ("cats/0.png", "cats/big/1.png", "dogs/.thumb.png"):
            record_files.write(os.path.join(folder, path), picture)
        record_files.write(os.path.join(folder, "dogs/0.PNG"), picture)
        record_files.write(
            os.path.join(folder, ".ipynb_checkpoints/note.txt"), b""
        )
        source = data.image_folder(folder)
        self.assertEqual(source.class_names, ("cats", "dogs"))
        self.assertEqual(source.num_records, 3)

    @parameterized.parameters("files", "tfrecords", "text", "csv")
    def test_a_path_need_not_be_a_string(self, name):
        folder = pathlib.Path(self.create_tempdir())
        record_files.shard(folder, "a.tfrecords")
        (folder / "a.csv").write_text("a\n1\n")
        (folder / "a.text").write_text("some text")
        (folder / "a.files").write_text("some text")
        arguments = {"text": {"length": 3}, "csv": {"dtypes": {"a": "int32"}}}
        make = functools.partial(getattr(data, name), **arguments.get(name, {}))
        paths = folder / f"*.{name}", [folder / f"a.{name}"]
        for one in map(make, paths):
            self.assertGreater(one.num_records, 0)

    def test_csv_with_a_column_that_is_not_there(self):
        path = os.path.join(self.create_tempdir(), "a.csv")
        with open(path, "w") as file:
            file.write("a,b\n1,2\n")
        with self.assertRaisesRegex(ValueError, r"columns are \['a', 'b'\]"):
            data.csv(path, dtypes={"c": "int32"})

    def test_arrays_of_different_lengths(self):
        with self.assertRaisesRegex(ValueError, r"\(3,\), \(4,\)"):
            data.arrays(np.zeros(3), np.zeros(4))


if __name__ == "__main__":
    tf.test.main()
