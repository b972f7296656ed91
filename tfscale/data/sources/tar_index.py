"""The samples of a WebDataset shard, found by the headers of a tar file.

    header (512 bytes) | data, filled up to 512 | header | ... | zeros (1024)

Headers have checksums, and the end is marked: a shard that was cut is detected
before the first step.
"""

import re
import tarfile

import numpy as np
import tensorflow as tf

from tfscale.data.sources import tfrecord_index
from tfscale.data.sources.source import data_loss

# The extension is what follows the first dot of the last part of a name.
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_TAR_BLOCK = 512
_ELSEWHERE = -1  # the size of links and of files with holes
_END_BYTES = 1 << 20  # the most padding after the last member


class Shard:
    """The files of a shard's samples, found by its headers."""

    def __init__(self, path):
        self.path = path
        self.size = tf.io.gfile.stat(path).length
        self.samples = []  # (key, [(extension, begin, size), ...])
        self.damage = None  # offset and reason
        try:
            at = self._scan()
        except (tarfile.TarError, tf.errors.OpError) as error:
            self.damage = (self._end(), str(error))
            return
        with tf.io.gfile.GFile(path, "rb") as file:
            file.seek(at)
            end = file.read(_END_BYTES) if at < self.size else b""
        if end[:_TAR_BLOCK] != bytes(_TAR_BLOCK):
            # `tarfile` takes any invalid header for the end.
            reason = "no header is there" if end else "its end is missing"
            self.damage = (at, reason)
        elif end.strip(b"\0"):
            reason = "more comes after its end, as if two files were joined"
            self.damage = (at, reason)

    def _scan(self):
        """Fills `samples`; returns the offset after the last member."""
        if tfrecord_index.compression_of(self.path) == "GZIP":
            raise ValueError(
                "Shards must be uncompressed tar files, to be read at any "
                f"offset. Received: {self.path}, which is compressed. Unpack "
                "it with gunzip."
            )
        at = 0
        with (
            tf.io.gfile.GFile(self.path, "rb") as file,
            tarfile.open(fileobj=file, mode="r:") as archive,
        ):
            for member in archive:
                at = archive.offset  # that of the next header
                match = _NAME.fullmatch(member.name)
                if match is None or member.isdir():
                    continue
                whole = member.isreg() and not member.issparse()
                size = member.size if whole else _ELSEWHERE
                key, extension = match[1], match[2].lower()
                if not self.samples or self.samples[-1][0] != key:
                    self.samples.append((key, []))
                self.samples[-1][1].append(
                    (extension, member.offset_data, size)
                )
        return at

    def _end(self):
        if not self.samples:
            return 0
        _, begin, size = self.samples[-1][1][-1]
        return begin + max(size, 0)

    def take(self, names, on_damage):
        """Keeps samples that have these files; returns the number of others.

        Their keys are in `sample_keys`; begins and sizes of their files are in
        `file_spans`, of shape `(num_samples, num_files, 2)`.
        """
        samples, kept = self.samples, []
        if self.damage is not None:
            if on_damage == "raise":
                offset, reason = self.damage
                self._fail("A tar file is damaged", reason, offset)
            # The last sample may go on after the damage.
            samples = samples[:-1]
        for key, files in samples:
            found = {
                name: (begin, size)
                for name, begin, size in files
                if size != _ELSEWHERE
            }
            if len(found) == len(files) and set(names) <= set(found):
                kept.append((key, [found[name] for name in names]))
            elif on_damage == "raise":
                about = f"{key!r} has {[_described(*file) for file in files]}"
                self._fail(
                    f"A sample must have one file of each of {names}",
                    about,
                    files[0][1],
                )
        self.sample_keys = [
            k.encode("utf-8", "surrogateescape") for k, _ in kept
        ]
        spans = np.array([spans for _, spans in kept], np.int64)
        self.file_spans = spans.reshape(len(kept), len(names), 2)
        # Damage before the first sample counts as one.
        return len(self.samples) - len(kept) or int(self.damage is not None)

    def _fail(self, rule, reason, offset):
        raise data_loss(
            f"{rule}: {reason}. Received: file {self.path}, offset {offset}. "
            "To leave out what cannot be read, use on_damage='skip'."
        )

    def spans(self):
        """Begin and end of each sample that was kept."""
        begins = self.file_spans[:, :, 0].min(axis=1)
        return begins, self.file_spans.sum(axis=2).max(axis=1)


def _described(name, _, size):
    return f"{name} (a link, or with holes)" if size == _ELSEWHERE else name
