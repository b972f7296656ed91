"""What goes wrong with data, and what the error says."""

import functools
import os
import pathlib
import shutil
import socket
from unittest import mock

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tests.source_files import REPOSITORY
from tfscale import data
from tfscale.data.caches import memory


def _shard(folder, name="0.tfrecord", count=10):
    path = os.path.join(folder, name)
    with tf.io.TFRecordWriter(path) as writer:
        for number in range(count):
            writer.write(b"record %02d" % number)
    return path


def _write(path, contents):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(contents)


_RECORD = 16 + len("record 00")


def _damage(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def _all(pipeline):
    return np.concatenate(list(pipeline.as_numpy_iterator())).tolist()


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
            _write(os.path.join(folder, path), picture)
        _write(os.path.join(folder, "dogs/0.PNG"), picture)
        _write(os.path.join(folder, ".ipynb_checkpoints/note.txt"), b"")
        source = data.image_folder(folder)
        self.assertEqual(source.class_names, ("cats", "dogs"))
        self.assertEqual(source.num_records, 3)

    @parameterized.parameters("files", "tfrecords", "text", "csv")
    def test_a_path_need_not_be_a_string(self, name):
        folder = pathlib.Path(self.create_tempdir())
        _shard(folder, "a.tfrecords")
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


class DamageTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.create_tempdir().full_path

    def test_damaged_data_raises_with_file_and_offset(self):
        path = _shard(self.folder)
        _damage(path, 3 * _RECORD + 14)
        pipeline = data.pipeline(data.tfrecords(path), batch_size=5)
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError,
            rf"cannot be read.*{path}\] \[offset\] \[{3 * _RECORD}\]",
        ):
            list(pipeline)

    @parameterized.parameters(
        (4 * _RECORD + 20, "ends within a record", 4),
        (4 * _RECORD + 7, "ends within a record's header", 4),
    )
    def test_a_truncated_file_is_found_before_the_first_step(
        self, size, reason, whole
    ):
        path = _shard(self.folder)
        os.truncate(path, size)
        with self.assertRaisesRegex(
            tf.errors.DataLossError,
            f"{reason}.*{path}, offset {whole * _RECORD}",
        ):
            data.tfrecords(path)

    def test_a_damaged_length_is_found_before_the_first_step(self):
        path = _shard(self.folder)
        _damage(path, 2 * _RECORD + 1)
        with self.assertRaisesRegex(
            tf.errors.DataLossError, f"length.*{path}, offset {2 * _RECORD}"
        ):
            data.tfrecords(path)

    @parameterized.parameters([[3]], [[0]], [[9]], [[2, 3, 7]])
    def test_damaged_records_are_skipped_and_counted(self, damaged):
        path = _shard(self.folder)
        for number in damaged:
            _damage(path, number * _RECORD + 14)
        with self.assertWarnsRegex(UserWarning, f"{len(damaged)} damaged"):
            source = data.tfrecords(path, on_damage="skip")
        self.assertEqual(source.num_skipped, len(damaged))
        good = [
            b"record %02d" % number
            for number in range(10)
            if number not in damaged
        ]
        pipeline = data.pipeline(source, batch_size=4)
        self.assertEqual(pipeline.cardinality(), -(-len(good) // 4))
        self.assertCountEqual(_all(pipeline), good)

    def test_the_rest_of_a_truncated_file_is_skipped(self):
        path = _shard(self.folder)
        os.truncate(path, 4 * _RECORD + 20)
        with self.assertWarnsRegex(UserWarning, "1 damaged"):
            source = data.tfrecords(path, on_damage="skip")
        self.assertLen(_all(data.pipeline(source, batch_size=4)), 4)

    def test_a_file_that_has_gone_is_named(self):
        path = _shard(self.folder)
        pipeline = data.pipeline(data.tfrecords(path), batch_size=5)
        os.remove(path)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, path):
            list(pipeline)

    def test_a_truncated_gzip_file_is_named(self):
        path = os.path.join(self.folder, "a.gz")
        with tf.io.TFRecordWriter(path, "GZIP") as writer:
            for _ in range(100):
                writer.write(os.urandom(100))
        os.truncate(path, 5000)
        with self.assertRaisesRegex(tf.errors.DataLossError, path):
            data.tfrecords(path, compression="GZIP")

    @parameterized.product(
        written=("", "GZIP", "ZLIB"),
        read=("", "GZIP", "ZLIB"),
        on_damage=("raise", "skip"),
    )
    def test_another_compression_than_the_files(self, written, read, on_damage):
        path = os.path.join(self.folder, "a.tfrecord")
        with tf.io.TFRecordWriter(path, written) as writer:
            for _ in range(3):
                writer.write(os.urandom(100))
        arguments = dict(compression=read, on_damage=on_damage)
        if written == read:
            self.assertEqual(data.tfrecords(path, **arguments).num_records, 3)
            return
        with self.assertRaisesRegex(
            ValueError, f"{path}.*compression='{written}'"
        ):
            data.tfrecords(path, **arguments)

    def test_a_compression_that_there_is_not(self):
        with self.assertRaisesRegex(ValueError, "compression='zip'"):
            data.tfrecords(_shard(self.folder), compression="zip")


class CsvTest(tf.test.TestCase, parameterized.TestCase):
    def _csv(self, contents, **kwargs):
        path = os.path.join(self.create_tempdir(), "a.csv")
        _write(path, contents)
        kwargs.setdefault("dtypes", {"a": "int32"})
        return data.csv(path, **kwargs)

    def _values(self, source):
        pipeline = data.pipeline(source, batch_size=99, shuffle=False)
        (batch,) = pipeline.as_numpy_iterator()
        return batch

    @parameterized.parameters(
        (b"a,b\n1,2\nx,4\n5,6\n", "not a valid int32: x", 8),
        (b"a,b\n1,2\n3\n5,6\n", "Expect 2 fields but have 1", 8),
        (b"a,b\n1,2\n3,4,5\n5,6\n", "Expect 2 fields but have 3", 8),
        (b"a,b\r\n1,2\r\nx,4\r\n5,6", "not a valid int32: x", 10),
        (b'a,b\n1,2\n3,"5,6', "Quoted field", 8),
    )
    def test_a_damaged_line_is_named_before_the_first_step(
        self, contents, reason, offset
    ):
        with self.assertRaisesRegex(
            tf.errors.DataLossError, rf"{reason}.*a.csv, offset {offset}"
        ):
            self._csv(contents)

    def test_damaged_lines_are_skipped_and_counted(self):
        lines = [b"%d,%d" % (n, n) for n in range(50)]
        damaged = (0, 17, 18, 49)
        for number in damaged:
            lines[number] = b"x,1"
        contents = b"\n".join([b"a,b", *lines])
        with self.assertWarnsRegex(UserWarning, "4 damaged lines of 1 "):
            source = self._csv(contents, on_damage="skip")
        self.assertEqual(source.num_skipped, 4)
        self.assertEqual(
            self._values(source)["a"].tolist(),
            [n for n in range(50) if n not in damaged],
        )

    @parameterized.parameters(
        b"\xef\xbb\xbfa,b\n1,2\n",
        b"a,b\r\n1,2\r\n\r\n",
        b'b,"x,y","a"\n3,4,1\n',
        b"\na,b\n\n1,2",
        b"a,\xe9\n1,2\n",
    )
    def test_as_programs_write_it(self, contents):
        self.assertEqual(self._values(self._csv(contents))["a"], [1])

    def test_a_file_without_a_line_among_others(self):
        folder = self.create_tempdir().full_path
        _write(os.path.join(folder, "0.csv"), b"")
        _write(os.path.join(folder, "1.csv"), b"a\n1\n")
        source = data.csv(folder + "/*", dtypes={"a": "int32"})
        self.assertEqual(self._values(source)["a"], [1])

    @parameterized.parameters("int32", np.int64, tf.float32, float, str, bool)
    def test_a_dtype_by_any_of_its_names(self, dtype):
        source = self._csv(b"a\n1\n", dtypes={"a": dtype})
        self.assertLen(self._values(source)["a"], 1)

    @parameterized.parameters("uint8", "complex64", "number")
    def test_a_dtype_that_a_column_cannot_have(self, dtype):
        with self.assertRaisesRegex(ValueError, f"'{dtype}' for 'a'"):
            self._csv(b"a\n1\n", dtypes={"a": dtype})

    @parameterized.parameters(
        {"dtypes": {}}, {"delimiter": ";;"}, {"on_damage": "warn"}
    )
    def test_as_it_cannot_be_read(self, **kwargs):
        (name,) = kwargs
        with self.assertRaisesRegex(ValueError, f"`{name}`.*{name}="):
            self._csv(b"a,b\n1,2\n", **kwargs)


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
                _write(os.path.join(self.folder, "cats", name), jpeg)

    @parameterized.parameters("1.jpg", "3.png", "5.jpg", "7.jpg")
    def test_raises_with_the_name_of_the_file(self, name):
        path = os.path.join(self.folder, "cats", name)
        _write(path, self.damaged[name])
        pipeline = data.pipeline(data.image_folder(self.folder), batch_size=8)
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, f"{path}.*on_damage="
        ):
            list(pipeline)

    def test_one_in_the_first_place_is_named_before_the_first_step(self):
        path = os.path.join(self.folder, "cats", "0.jpg")
        _write(path, b"")
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, path):
            data.pipeline(data.image_folder(self.folder), batch_size=8)

    @parameterized.parameters((0, 0), (3, 2), (6, 4))  # the first, the last
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
        _write(path, tf.io.encode_jpeg(tf.zeros([8, 8, 3], tf.uint8)).numpy())
        pipeline = data.pipeline(
            data.image_folder(self.folder), batch_size=2, parse=parse
        )
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, "of another height"
        ):
            list(pipeline)

    @parameterized.parameters("parse", "augment")
    def test_where_most_fail_not_all_are_tried_before_it_is_said(self, where):
        # A forgotten resize was said once an epoch had been decoded.
        folder = self.create_tempdir().full_path
        for size in range(1, 201):
            image = tf.zeros([size, 8, 3], tf.uint8)
            path = os.path.join(folder, "cats", f"{size:03}.jpg")
            _write(path, tf.io.encode_jpeg(image).numpy())
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
        _write(path, contents)
        image, _ = data.image_folder(folder).decode(contents, 0, path)
        self.assertAllEqual(image, [[[255, 0, 0], [0, 0, 255]]])
        _write(path, contents[:-9])
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, path):
            data.pipeline(data.image_folder(folder), batch_size=1)

    def test_they_are_skipped_and_counted(self):
        for name, contents in self.damaged.items():
            _write(os.path.join(self.folder, "cats", name), contents)
        with self.assertWarnsRegex(UserWarning, "4 damaged.* of 9.*1.jpg"):
            source = data.image_folder(self.folder, on_damage="skip")
        self.assertEqual((source.num_records, source.num_skipped), (5, 4))
        (batch,) = data.pipeline(source, batch_size=8)
        self.assertEqual(batch[0].shape, (5, 32, 32, 3))


class ArgumentsTest(tf.test.TestCase, parameterized.TestCase):
    def _pipeline(self, **kwargs):
        kwargs.setdefault("batch_size", 2)
        return data.pipeline(data.arrays(np.arange(9)), **kwargs)

    @parameterized.parameters(
        {"batch_size": 0},
        {"batch_size": 2.0},
        {"batch_size": None},
        {"batch_size": True},
        {"shuffle_window": 0},
        {"prefetch": -2},
        {"prefetch": None},
        {"parallelism": 0},
        {"interleaved_reads": 0},
        {"num_threads": -1},
        {"ram_budget": -1},
        {"service_lanes": 0},
        {"seed": None},
        {"seed": 0.5},
        {"seed": 2**63},
    )
    def test_a_number_that_means_nothing(self, **kwargs):
        ((name, value),) = kwargs.items()
        with self.assertRaisesRegex(
            (TypeError, ValueError), f"`{name}` must .*{name}={value}"
        ):
            self._pipeline(**kwargs)

    def test_numbers_of_numpy_are_numbers(self):
        pipeline = self._pipeline(batch_size=np.int64(3), seed=np.int32(1))
        self.assertLen(list(pipeline), 3)

    @parameterized.named_parameters(
        ("array", lambda: np.arange(9), "tfscale.data.arrays"),
        ("dataset", lambda: tf.data.Dataset.range(9), "tfscale.data.dataset"),
        ("path", lambda: "/folder/*.tfrecord", "builder"),
    )
    def test_what_no_builder_returned(self, source, advice):
        with self.assertRaisesRegex(TypeError, f"`source`.*{advice}"):
            data.pipeline(source(), batch_size=2)

    def test_a_list_is_an_array(self):
        source = data.arrays(np.zeros([3, 2]), ["a", "b", "c"])
        ((_, names),) = data.pipeline(source, batch_size=3, shuffle=False)
        self.assertAllEqual(names, [b"a", b"b", b"c"])

    @parameterized.named_parameters(
        ("none", lambda: None),
        ("ragged", lambda: tf.ragged.constant([[1], [2, 3]])),
        ("objects", lambda: np.array([[1], [2, 3]], dtype=object)),
    )
    def test_arrays_of_which_no_tensor_can_be_made(self, array):
        with self.assertRaisesRegex(TypeError, "dense"):
            data.arrays(np.zeros(2), array())

    @parameterized.named_parameters(
        ("nothing", lambda x: None, "must return"),
        ("ragged", lambda x: tf.ragged.constant([[1], [2, 3]]), "to_tensor"),
    )
    def test_a_parse_that_returns_no_record(self, parse, advice):
        with self.assertRaisesRegex(TypeError, advice):
            self._pipeline(parse=parse)

    def test_a_parse_that_returns_a_list(self):
        for batch in self._pipeline(parse=lambda x: [x, 2 * x]):
            self.assertAllEqual(2 * batch[0], batch[1])

    def test_a_dataset_that_is_none(self):
        with self.assertRaisesRegex(TypeError, "from_generator"):
            data.dataset([1, 2, 3])

    @parameterized.parameters(-1, 0, 11)
    def test_fewer_records_than_there_are(self, num_records):
        with self.assertRaisesRegex(ValueError, f"={num_records}, dataset"):
            data.dataset(tf.data.Dataset.range(10), num_records=num_records)

    @parameterized.parameters(0, 7)
    def test_a_dataset_that_ends_too_early(self, count):
        # It was taken for a shorter epoch, which then was repeated for ever,
        # because its last record never came.
        dataset = tf.data.Dataset.range(10).filter(lambda x: x < count)
        source = data.dataset(dataset, num_records=9)
        with self.assertRaisesRegex(
            tf.errors.FailedPreconditionError, f"9 .*only {count}"
        ):
            list(data.pipeline(source, batch_size=2))

    def test_an_epoch_of_an_endless_dataset_is_its_beginning(self):
        dataset = tf.data.Dataset.range(10).repeat()
        source = data.dataset(dataset, num_records=7)
        pipeline = data.pipeline(source, batch_size=2)
        for _ in range(2):
            self.assertCountEqual(_all(pipeline), range(7))

    @parameterized.parameters([None], [["train", "test"]])
    def test_tfds_without_one_split(self, split):
        with self.assertRaisesRegex(ValueError, "one split"):
            data.tfds("mnist", split)

    def test_tfds_that_is_divided_already(self):
        config = tfds.ReadConfig(input_context=tf.distribute.InputContext(2))
        with self.assertRaisesRegex(ValueError, "tfscale.data.pipeline"):
            data.tfds("mnist", "train", read_config=config)


class EmptyAndUnequalTest(tf.test.TestCase, parameterized.TestCase):
    def test_an_empty_dataset(self):
        empty = _shard(self.create_tempdir().full_path, count=0)
        for source in (
            data.tfrecords(empty),
            data.dataset(tf.data.Dataset.range(0)),
            data.arrays(np.zeros([0, 2])),
        ):
            with self.assertRaisesRegex(ValueError, "empty"):
                data.pipeline(source, batch_size=2)

    def test_nothing_left_after_dropping(self):
        with self.assertRaisesRegex(ValueError, "4 records, batch_size=8"):
            data.pipeline(
                data.arrays(np.arange(4)), batch_size=8, remainder="drop"
            )

    @parameterized.parameters(-1, -2)
    def test_a_dataset_of_unknown_length(self, cardinality):
        dataset = tf.data.Dataset.range(9)
        if cardinality == -1:
            dataset = dataset.repeat()
        else:
            dataset = dataset.filter(lambda x: x > 2)
        with self.assertRaisesRegex(ValueError, "num_records"):
            data.dataset(dataset)

    def _pipeline(self, records, workers, **kwargs):
        context = tf.distribute.InputContext(workers, 0, workers)
        return data.pipeline(
            data.arrays(np.arange(records)), input_context=context, **kwargs
        )

    def test_a_batch_that_workers_cannot_share(self):
        with self.assertRaisesRegex(ValueError, "batch_size=8.*3 replicas"):
            self._pipeline(30, 3, batch_size=8)

    def test_a_last_batch_with_fewer_records_than_workers(self):
        with self.assertRaisesRegex(ValueError, "1 records in it for 2"):
            self._pipeline(17, 2, batch_size=8)

    def test_fewer_files_than_workers(self):
        folder = self.create_tempdir().full_path
        source = data.tfrecords(_shard(folder))
        context = tf.distribute.InputContext(2, 0, 2)
        with self.assertRaisesRegex(ValueError, "a file of its own"):
            data.pipeline(
                source, batch_size=2, shard="files", input_context=context
            )

    def test_files_where_there_are_none(self):
        context = tf.distribute.InputContext(2, 0, 2)
        with self.assertRaisesRegex(ValueError, "arrays"):
            data.pipeline(
                data.arrays(np.arange(8)),
                batch_size=2,
                shard="files",
                input_context=context,
            )

    def test_padding_without_a_place_for_weights(self):
        with self.assertRaisesRegex(ValueError, "sample_weight"):
            data.pipeline(
                data.arrays(np.arange(9)), batch_size=4, remainder="pad"
            )

    @parameterized.parameters(
        {"remainder": "wrap"}, {"cache": "disk"}, {"shard": "auto"}
    )
    def test_an_unknown_choice(self, **kwargs):
        with self.assertRaisesRegex(ValueError, next(iter(kwargs.values()))):
            data.pipeline(data.arrays(np.arange(9)), batch_size=3, **kwargs)


def _other_rows(path):
    """300 rows, of which one depends on the path."""
    rows = np.arange(300)
    rows[155] = 1000 if path.endswith("two") else 155
    return rows


def _other_files(path):
    """300 files that hold the same, and a shard; one of them is another."""
    os.makedirs(path)
    for row in _other_rows(path):
        tf.io.write_file(os.path.join(path, f"{row:04}"), "same")
    shard = path + ".tfrecord"
    with tf.io.TFRecordWriter(shard) as writer:
        for row in _other_rows(path):
            writer.write(str(row).encode())
    return os.path.join(path, "*"), shard


class CacheTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = os.path.join(self.create_tempdir(), "cache")

    def _pipeline(self, **kwargs):
        return data.pipeline(
            data.arrays(np.arange(10)),
            parse=kwargs.pop("parse", lambda x: tf.fill([100], x)),
            batch_size=5,
            **kwargs,
        )

    def _file(self, **kwargs):
        return self._pipeline(cache="file", cache_dir=self.folder, **kwargs)

    def test_auto_is_memory_then_file_then_none(self):
        choose = {"cache_dir": self.folder}
        self.assertEqual(self._pipeline(**choose).recipe.cache_kind, "memory")
        tight = self._pipeline(ram_budget=4000, **choose)
        self.assertEqual(tight.recipe.cache_kind, "file")
        none = self._pipeline(ram_budget=4000)
        self.assertEqual(none.recipe.cache_kind, "none")
        full = mock.Mock(return_value=mock.Mock(free=100))
        with mock.patch.object(shutil, "disk_usage", full):
            none = self._pipeline(ram_budget=4000, **choose)
        self.assertEqual(none.recipe.cache_kind, "none")

    def test_memory_that_does_not_fit_is_refused(self):
        with self.assertRaisesRegex(ValueError, "memory budget"):
            self._pipeline(cache="memory", ram_budget=4000)

    @parameterized.parameters("none", False, None)
    def test_none_is_asked_for_in_any_of_these_words(self, cache):
        self.assertEqual(self._pipeline(cache=cache).recipe.cache_kind, "none")

    def test_a_window_that_does_not_fit_is_refused(self):
        path = _shard(self.create_tempdir().full_path)
        with self.assertRaisesRegex(ValueError, "shuffle_window=10.*Use 9 or"):
            data.pipeline(
                data.tfrecords(path),
                batch_size=2,
                shuffle_window=10,
                ram_budget=1000,
                cache="none",
            )

    def test_a_disk_that_is_too_small_is_named_and_left_clean(self):
        full = mock.Mock(return_value=mock.Mock(free=100))
        with (
            mock.patch.object(shutil, "disk_usage", full),
            self.assertRaisesRegex(OSError, f"{self.folder}.*100 bytes free"),
        ):
            self._file()
        self.assertEmpty(os.listdir(self.folder))

    def test_a_disk_that_fills_up_is_named_and_left_clean(self):
        error = tf.errors.ResourceExhaustedError(None, None, "No space left")
        with (
            mock.patch.object(tf.io.TFRecordWriter, "write", side_effect=error),
            self.assertRaisesRegex(OSError, "could not be written"),
        ):
            self._strings()
        self.assertEmpty(os.listdir(self.folder))
        self.assertLen(list(self._strings()), 2)  # no stale lock

    def test_a_write_that_really_fails_is_named_and_left_clean(self):
        # The system refuses to let a file grow, as a full disk does.
        code = (
            "import os, resource, sys\n"
            "import numpy as np, tensorflow as tf\n"
            "from tfscale import data\n"
            "def run():\n"
            "    return data.pipeline(data.arrays(np.arange(10)),\n"
            "        parse=lambda x: tf.fill([100], x), batch_size=5,\n"
            "        cache='file', cache_dir=sys.argv[1])\n"
            "_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))\n"
            "try:\n"
            "    run()\n"
            "except OSError as error:\n"
            "    print(error)\n"
            "print(os.listdir(sys.argv[1]))\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
            "print(len(list(run())))\n"
        )
        done = forked_python.run(["-c", code, self.folder], REPOSITORY)
        self.assertEqual(done.returncode, 0, done.stderr)
        error, left, batches = done.stdout.splitlines()
        self.assertIn("could not be written", error)
        self.assertIn(self.folder, error)
        self.assertEqual((left, batches), ("[]", "2"))

    def test_a_cache_is_used_by_later_runs(self):
        self._file()

        def parse(number):
            values = tf.fill([100], number)
            # Some are made again and compared: not the fifth of ten records.
            check = tf.debugging.Assert(number != 4, ["parsed again"])
            with tf.control_dependencies([check]):
                return tf.identity(values)

        self.assertLen(list(self._file(parse=parse)), 2)

    def test_a_cache_of_another_parse_is_refused(self):
        self._file()
        with self.assertRaisesRegex(ValueError, "have changed.*Delete"):
            self._file(parse=lambda x: tf.fill([100], x + 1))

    def test_a_parse_that_differs_in_later_records_is_refused(self):
        # Once the first record alone was compared: here it is all zeros.
        self._file()
        with self.assertRaisesRegex(ValueError, "record 1 differs"):
            self._file(parse=lambda x: tf.fill([100], 2 * x))

    @parameterized.named_parameters(
        ("arrays", lambda path: data.arrays(_other_rows(path))),
        ("files", lambda path: data.files(_other_files(path))),
        ("tfrecords", lambda path: data.tfrecords(_other_files(path)[1])),
        ("tokens", lambda path: data.tokens(_other_rows(path), 1)),
    )
    def test_other_data_of_the_same_shape_has_a_cache_of_its_own(self, make):
        # Hundreds of records, so that no sample of them tells.
        folder = self.create_tempdir().full_path
        seen = []
        for which in ("one", "two"):
            path = os.path.join(folder, which)
            pipeline = data.pipeline(
                make(path),
                parse=lambda *record: record[0],
                batch_size=10**6,
                shuffle=False,
                cache="file",
                cache_dir=self.folder,
            )
            seen.append(next(pipeline.as_numpy_iterator()).tolist())
        self.assertNotEqual(*seen)
        self.assertLen(os.listdir(self.folder), 2)

    def _strings(self):
        return self._file(parse=lambda x: tf.fill([9], tf.strings.as_string(x)))

    @parameterized.parameters("0.bin", "sums.bin", "records.tfrecord")
    def test_a_damaged_record_of_a_cache_is_no_record(self, file):
        # Once the error did not say which file it was.
        make = self._strings if file == "records.tfrecord" else self._file
        make()
        (name,) = os.listdir(self.folder)
        path = os.path.join(self.folder, name, file)
        _damage(path, os.path.getsize(path) * 9 // 20)  # in the fifth record
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError,
            rf"damaged.*{name}.*\[4\]?\].*Delete",
        ):
            list(make())

    @parameterized.parameters(
        "0.bin", "sums.bin", "about.json", "records.tfrecord", "offsets.npy"
    )
    def test_a_cache_that_is_not_whole_is_named(self, file):
        strings = file in ("records.tfrecord", "offsets.npy")
        make = self._strings if strings else self._file
        make()
        (name,) = os.listdir(self.folder)
        path = os.path.join(self.folder, name, file)
        os.truncate(path, os.path.getsize(path) // 2)
        with self.assertRaisesRegex(ValueError, f"whole.*{name}.*Delete"):
            make()
        os.remove(path)
        with self.assertRaisesRegex(ValueError, f"whole.*{name}.*Delete"):
            make()

    def test_a_remote_cache_is_refused(self):
        with self.assertRaisesRegex(ValueError, "this machine.*ram://cache"):
            self._pipeline(cache="file", cache_dir="ram://cache")

    def test_what_fails_while_a_cache_is_written_is_not_the_disk(self):
        path = _shard(self.create_tempdir().full_path)
        _damage(path, 3 * _RECORD + 14)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, path):
            data.pipeline(
                data.tfrecords(path),
                batch_size=2,
                cache="file",
                cache_dir=self.folder,
            )
        self.assertEmpty(os.listdir(self.folder))

    def test_what_another_host_is_writing_is_left_alone(self):
        self._file()
        (name,) = os.listdir(self.folder)
        other = f"{name}.partial-{socket.gethostname()}-2-99999999"
        os.mkdir(os.path.join(self.folder, other))
        self._file()
        self.assertIn(other, os.listdir(self.folder))

    def test_a_killed_run_leaves_nothing_in_the_way(self):
        code = (
            "import os, sys, signal\n"
            "import numpy as np, tensorflow as tf\n"
            "from tfscale import data\n"
            "write = tf.io.TFRecordWriter.write\n"
            "def killed(self, value):\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
            "tf.io.TFRecordWriter.write = killed\n"
            "data.pipeline(data.arrays(np.arange(10)), batch_size=5,\n"
            "    parse=lambda x: tf.fill([9], tf.strings.as_string(x)),\n"
            "    cache='file', cache_dir=sys.argv[1])\n"
        )
        done = forked_python.run(["-c", code, self.folder], REPOSITORY)
        self.assertEqual(done.returncode, -9)
        self.assertLen(os.listdir(self.folder), 1)  # what it left
        self.assertLen(list(self._strings()), 2)
        names = os.listdir(self.folder)
        self.assertLen(names, 1)
        self.assertNotIn("partial", names[0])


class MemoryTest(absltest.TestCase):
    def _cgroup(self, files):
        folder = self.create_tempdir()
        for name, text in files.items():
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write(text)
        return folder.full_path

    def test_budget_is_half_of_what_is_free(self):
        free = self._cgroup({"memory.max": "max", "memory.current": "5"})
        self.assertEqual(memory.budget(cgroup=free, available=1000), 500)

    def test_budget_respects_both_versions_of_cgroups(self):
        two = self._cgroup({"memory.max": "600", "memory.current": "200"})
        self.assertEqual(memory.budget(cgroup=two, available=1000), 200)
        one = self._cgroup(
            {
                "memory/memory.limit_in_bytes": "300",
                "memory/memory.usage_in_bytes": "100",
            }
        )
        self.assertEqual(memory.budget(cgroup=one, available=1000), 100)

    def test_budget_of_this_machine_is_positive(self):
        self.assertGreater(memory.budget(), 0)


class TfdsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(("cifar10", (32, 32, 3)), ("mnist", (28, 28, 1)))
    def test_by_name(self, name, shape):
        with tfds.testing.mock_data(num_examples=20):
            pipeline = data.pipeline(data.tfds(name, "train"), batch_size=8)
            images, labels = pipeline.element_spec
            self.assertEqual(images.shape, (None, *shape))
            self.assertEqual(labels.dtype, tf.int64)
            self.assertLen(list(pipeline), 3)
            features = data.pipeline(
                data.tfds(
                    name,
                    "train",
                    as_supervised=False,
                    read_config=tfds.ReadConfig(try_autocache=False),
                ),
                batch_size=8,
            )
            self.assertIn("label", features.element_spec)
            self.assertEqual(features.element_spec["image"].dtype, tf.uint8)


if __name__ == "__main__":
    absltest.main()
