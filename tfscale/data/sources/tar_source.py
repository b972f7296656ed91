"""WebDataset shards: tar files in which neighbors with one key are a record.

000.jpg 000.cls | 001.jpg 001.cls | ...      members; keys "000", "001"
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfscale.data import single_device
from tfscale.data.sources import file_blocks
from tfscale.data.sources import file_source
from tfscale.data.sources import index_files
from tfscale.data.sources import tar_index
from tfscale.data.sources.source import DAMAGED
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.source import check_on_damage
from tfscale.data.sources.source import warn_of_skipped

_KEY = "__key__"


def webdataset(
    pattern: file_source.Pattern,
    *,
    extensions: Sequence[str] | None = None,
    on_damage: str = "raise",
) -> BlockSource:
    """Records are the samples of WebDataset shards, uncompressed tar files.

    A sample is a run of files with one name up to the first dot; folders, and
    files without such a name, are left out. A sample with links or files with
    holes is incomplete. The headers are read once, many shards at a time; then
    samples are read by their offsets. A tar file has checksums of its headers,
    not of the data.

    Args:
        pattern: Path or glob, or a list of them, for `tf.io.gfile`.
        extensions: List of strings, `["jpg", "cls"]` for instance: the files of
            a sample that are read. By default those of the first sample.
        on_damage: `"raise"`, with the shard and the offset, when one is
            damaged or a sample has not one file of each extension, or
            `"skip"`: such samples, and the rest of a damaged shard, are left
            out, and counted in a warning.

    Returns:
        A source of dicts from extension, in lower case, to the file's
        contents, and from `"__key__"` to the sample's name: scalar strings.

    Raises:
        FileNotFoundError: If no shard matches.
        ValueError: If a shard is compressed, or an argument not as above.
        tf.errors.DataLossError: If a shard is damaged or a sample incomplete.

    Source: the format of https://github.com/webdataset/webdataset.

    Example:

    >>> import io
    >>> import tarfile
    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/0.tar"
    >>> with tarfile.open(path, "w") as archive:
    ...     for name in ("0.txt", "0.cls", "1.txt", "1.cls"):
    ...         member = tarfile.TarInfo(name)
    ...         member.size = 1
    ...         archive.addfile(member, io.BytesIO(name[:1].encode()))
    >>> webdataset(path).num_records
    2
    """
    check_on_damage(on_damage)
    is_string = isinstance(extensions, str)
    if extensions is not None and not is_string:
        extensions = list(extensions)  # a generator is read only once
    if is_string or extensions == []:
        raise ValueError(
            "`extensions` must be a list of strings or None. Received: "
            f"extensions={extensions!r}."
        )
    paths = file_source.match(pattern)
    shards = index_files.index_files(paths, tar_index.Shard, None)
    if extensions is None:
        samples = (sample for shard in shards for sample in shard.samples)
        extensions = [name for name, _, _ in next(samples, (None, []))[1]]
    names = list(dict.fromkeys(name.lower() for name in extensions))
    skipped = sum(shard.take(names, on_damage) for shard in shards)
    warn_of_skipped(
        skipped,
        f"samples of {len(shards)} tar files",
        " (the rest of a file whose headers are damaged counts as one)",
    )
    return _source(shards, names, skipped)


def _source(shards, names, skipped):
    shards = [shard for shard in shards if shard.sample_keys]
    blocks, all_begins = [], [np.zeros([0], np.int64)]
    for number, shard in enumerate(shards):
        begins, ends = shard.spans()
        all_begins.append(begins)
        for first, last in file_blocks.runs_of(begins):
            size = ends[last - 1] - begins[first]
            blocks.append((number, last - first, begins[first], size))
    keys = tf.constant([k for s in shards for k in s.sample_keys], tf.string)
    none = np.zeros([0, len(names), 2], np.int64)
    file_spans = tf.constant(
        np.concatenate([none, *(s.file_spans for s in shards)])
    )
    sizes = tf.constant([shard.size for shard in shards], tf.int64)

    def read(block):
        samples = slice(block.first, block.first + block.count)
        size = tf.maximum(block.size, 1)  # where all files are empty
        data = tf.data.FixedLengthRecordDataset(
            block.path,
            record_bytes=size,
            header_bytes=block.begin,
            footer_bytes=tf.gather(sizes, block.file) - block.begin - size,
        )

        def cut(_, data):
            files = {
                name: tf.strings.substr(
                    data,
                    file_spans[samples, at, 0] - block.begin,
                    file_spans[samples, at, 1],
                )
                for at, name in enumerate(names)
            }
            return {**files, _KEY: keys[samples]}

        # `range` ends it: a file that cannot be opened fails for ever.
        counted = tf.data.Dataset.zip(tf.data.Dataset.range(1), data)
        records = single_device.map_on_host(counted.ignore_errors(), cut)
        damaged = tf.data.Dataset.from_tensors(
            {name: tf.fill([block.count], DAMAGED) for name in [*names, _KEY]}
        )
        return records.concatenate(damaged).take(1)

    spec = tf.TensorSpec([], tf.string)
    return file_blocks.source_of_files(
        "webdataset",
        shards,
        [shard.path for shard in shards],
        blocks,
        read,
        lambda share: _source(share, names, skipped),
        np.concatenate(all_begins),
        record_spec={name: spec for name in [*names, _KEY]},
        num_skipped=skipped,
    )
