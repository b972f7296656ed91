"""WebDataset shards: names, values and damage. The rest is in the contract."""

import gzip
import io
import os
import tarfile

import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale import data

_LONG = "a/" * 90 + "long"  # needs a header of its own
_FILES = {
    "b.x/one.seg.png": b"\x00\xff" * 700,
    "b.x/one.Txt": b"",
    "two.seg.png": b"2",
    "two.txt": "ä".encode(),
    f"{_LONG}.seg.png": b"3" * 512,
    f"{_LONG}.txt": b"drei",
}


class TarTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = os.path.join(self.create_tempdir().full_path, "0.tar")

    def _write(self, files=_FILES, format=tarfile.PAX_FORMAT):
        """Writes a shard; returns where the header of each member begins."""
        with tarfile.open(self.path, "w", format=format) as archive:
            folder = tarfile.TarInfo("folder.txt")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
            for name, contents in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(contents)
                archive.addfile(member, io.BytesIO(contents))
                archive.addfile(tarfile.TarInfo("README"))
        with tarfile.open(self.path) as archive:
            return {m.name: m.offset for m in archive.getmembers()}

    def _batch(self, source):
        pipeline = data.pipeline(source, batch_size=99, shuffle=False)
        (batch,) = pipeline.as_numpy_iterator()
        return {name: column.tolist() for name, column in batch.items()}

    @parameterized.parameters(tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)
    @pytest.mark.crossing(every=2)
    def test_values(self, format):
        self._write(format=format)
        batch = self._batch(data.webdataset(self.path))
        contents = list(_FILES.values())
        self.assertEqual(batch["seg.png"], contents[::2])
        self.assertEqual(batch["txt"], contents[1::2])
        self.assertEqual(batch["__key__"], [b"b.x/one", b"two", _LONG.encode()])

    def test_extensions_that_are_asked_for_from_another_file_system(self):
        self._write()
        path = "ram://extensions.tar"
        tf.io.gfile.copy(self.path, path, overwrite=True)
        generator = (name for name in ["txt"])  # which is read only once
        batch = self._batch(data.webdataset(path, extensions=generator))
        self.assertEqual(list(batch), ["txt", "__key__"])
        self.assertEqual(batch["txt"], list(_FILES.values())[1::2])

    @parameterized.parameters(
        {"missing": "two.txt", "at": "two.seg.png"},
        {"renamed": ("two.txt", "two.seg.PNG"), "at": "two.seg.png"},
    )
    def test_an_incomplete_sample(self, at, missing=None, renamed=(None, None)):
        old, new = renamed
        files = {
            new if name == old else name: contents
            for name, contents in _FILES.items()
            if name != missing
        }
        offset = self._write(files)[at] + 512
        with self.assertRaisesRegex(
            tf.errors.DataLossError, f"'two' has .*{self.path}, offset {offset}"
        ):
            data.webdataset(self.path)
        with self.assertWarnsRegex(UserWarning, "1 damaged samples of 1 tar"):
            source = data.webdataset(self.path, on_damage="skip")
        self.assertEqual((source.num_records, source.num_skipped), (2, 1))
        batch = self._batch(source)
        self.assertEqual(batch["__key__"], [b"b.x/one", _LONG.encode()])
        self.assertEqual(batch["txt"], [b"", b"drei"])

    @parameterized.parameters("header", "cut in data", "cut behind data")
    @pytest.mark.crossing(every=3)
    def test_a_damaged_shard(self, kind):
        at = self._write()["two.txt"]
        if kind == "header":
            with open(self.path, "r+b") as file:
                file.seek(at + 20)
                file.write(b"damage")
        else:
            os.truncate(self.path, at + (513 if kind == "cut in data" else 0))
        with self.assertRaisesRegex(
            tf.errors.DataLossError, f"tar file is damaged.*{self.path}, offset"
        ):
            data.webdataset(self.path)
        with self.assertWarnsRegex(UserWarning, "1 damaged samples of 1 tar"):
            source = data.webdataset(self.path, on_damage="skip")
        key = source.first()["__key__"]
        self.assertEqual((source.num_records, key), (1, b"b.x/one"))

    @parameterized.parameters("link", "holes")
    def test_a_file_that_is_elsewhere_is_not_left_out_unsaid(self, kind):
        # Once a sample that was a link was missing, without a word; a file
        # with holes at the end was an error without a name.
        with tarfile.open(self.path, "w", format=tarfile.GNU_FORMAT) as archive:
            for name in ("one.txt", "two.txt"):
                member = tarfile.TarInfo(name)
                member.size = 2
                archive.addfile(member, io.BytesIO(b"ab"))
            member = tarfile.TarInfo("three.txt")
            if kind == "link":
                member.type, member.linkname = tarfile.LNKTYPE, "one.txt"
                archive.addfile(member)
            else:
                # A header of GNU's: 2 bytes at 0 of a file of 4096.
                member.size, member.type = 2, tarfile.GNUTYPE_SPARSE
                header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
                for at, number in ((386, 0), (398, 2), (483, 4096)):
                    header[at : at + 12] = b"%011o\0" % number
                header[148:156] = b" " * 8
                header[148:156] = b"%06o\0 " % sum(header)
                archive.fileobj.write(header + b"ab".ljust(512, b"\0"))
        with self.assertRaisesRegex(
            tf.errors.DataLossError, r"'three' has .*a link.*offset \d+"
        ):
            data.webdataset(self.path)
        with self.assertWarnsRegex(UserWarning, "1 damaged samples of 1 tar"):
            source = data.webdataset(self.path, on_damage="skip")
        self.assertEqual(self._batch(source)["__key__"], [b"one", b"two"])

    def test_shards_that_were_joined_with_cat(self):
        # What came behind the end of the first one was not read.
        self._write()
        with open(self.path, "rb") as file:
            contents = file.read()
        with open(self.path, "ab") as file:
            file.write(contents)
        with self.assertRaisesRegex(tf.errors.DataLossError, "more comes"):
            data.webdataset(self.path)

    def test_a_shard_that_changes_afterwards_is_named(self):
        self._write()
        pipeline = data.pipeline(
            data.webdataset(self.path), batch_size=2, cache="none"
        )
        os.truncate(self.path, 2048)
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, f"{self.path}.*on_damage="
        ):
            list(pipeline)

    def test_what_is_no_shard(self):
        for contents in (b"", b"no tar file", bytes(5)):
            with open(self.path, "wb") as file:
                file.write(contents)
            with self.assertRaisesRegex(tf.errors.DataLossError, self.path):
                data.webdataset(self.path)
        with gzip.open(self.path, "wb") as file:
            file.write(bytes(1024))
        with self.assertRaisesRegex(ValueError, f"{self.path}.*gunzip"):
            data.webdataset(self.path)

    @parameterized.parameters({"extensions": "txt"}, {"on_damage": "keep"})
    def test_arguments(self, **kwargs):
        (name,) = kwargs
        with self.assertRaisesRegex(ValueError, f"`{name}`.*{name}="):
            data.webdataset(self.path, **kwargs)


if __name__ == "__main__":
    absltest.main()
