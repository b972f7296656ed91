"""A cache on disk: parsed records written once, read by their numbers.

It is written beside its place and renamed when it is whole. Hence a run that
is killed leaves no lock and no half a cache, two runs that write the same one
do not disturb each other, and whoever finds a cache finds all of it.
"""

import json
import os
import shutil
import socket

import keras
import numpy as np
import tensorflow as tf

_RECORDS, _OFFSETS, _ABOUT = "records.tfrecord", "offsets.npy", "about.json"
_FRAME = 16  # bytes that TFRecord adds to a record


class FileCache:
    """Parsed records in a file, under their numbers.

    Args:
        directory: String, where `write` has put them.
        spec: Structure of `tf.TensorSpec`, what a record is.
        first: Structure of eager tensors: record 0, to compare.

    Raises:
        ValueError: If the directory holds other data.
    """

    def __init__(self, directory, spec, first):
        self._spec = spec
        self._path = os.path.join(directory, _RECORDS)
        with tf.io.gfile.GFile(os.path.join(directory, _OFFSETS), "rb") as file:
            self._offsets = tf.constant(np.load(file))
        number = tf.data.Dataset.range(1).map(
            lambda i: self.get_or_make(i, None)
        )
        try:
            kept = number.get_single_element()
            keras.tree.assert_same_structure(kept, first)
            same = all(
                a.dtype == b.dtype and np.array_equal(a.numpy(), b.numpy())
                for a, b in zip(
                    keras.tree.flatten(kept), keras.tree.flatten(first)
                )
            )
        except (ValueError, tf.errors.OpError):
            same = False
        if not same:
            raise ValueError(
                "A cache must hold what `parse` returns now. Received: cache "
                f"{directory}, whose first record differs: the data or `parse` "
                "have changed. Delete that directory or use another "
                "`cache_dir`."
            )

    def is_full(self):
        """Every record is there: a bool scalar tensor; for tf.data."""
        return tf.constant(True)

    def get_or_make(self, index, make):
        """The record; `make` is what a `MemoryCache` needs."""
        del make
        offset = tf.gather(self._offsets, index)
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=[self._path],
            compression_type="",
            buffer_size=tf.gather(self._offsets, index + 1) - offset,
            byte_offsets=offset[tf.newaxis],
        )
        records = tf.data.experimental.from_variant(
            variant, tf.TensorSpec([], tf.string)
        )
        value = records.take(1).get_single_element()
        parts = tf.unstack(
            tf.io.parse_tensor(value, tf.string),
            num=len(keras.tree.flatten(self._spec)),
        )
        parts = [
            tf.ensure_shape(tf.io.parse_tensor(part, spec.dtype), spec.shape)
            for part, spec in zip(parts, keras.tree.flatten(self._spec))
        ]
        return keras.tree.pack_sequence_as(self._spec, parts)


def place(cache_dir, kind, num_records, spec):
    """The directory of one source's cache within `cache_dir`."""
    parts = [
        f"{part.dtype.name}{part.shape.as_list()}"
        for part in keras.tree.flatten(spec)
    ]
    name = f"{kind}-{num_records}-{'-'.join(parts)}"
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    return os.path.join(cache_dir, name[:120])


def write(directory, records, spec, need):
    """Writes all records, unless another run has.

    Args:
        directory: String, from `place`.
        records: `tf.data.Dataset` of the parsed records in order.
        spec: Structure of `tf.TensorSpec`, what a record is.
        need: Integer, bytes that they will take, about.

    Raises:
        OSError: If the disk is too small, or fills up on the way.
    """
    _sweep(directory)
    if os.path.isdir(directory):
        return
    parent = os.path.dirname(directory)
    os.makedirs(parent, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if need > free:
        raise OSError(_full(directory, need, free))
    partial = f"{directory}.partial-{socket.gethostname()}-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    os.makedirs(partial)
    try:
        _write(partial, records, spec)
        try:
            os.rename(partial, directory)
        except OSError:
            if not os.path.isdir(directory):  # nobody else was first
                raise
    except (OSError, tf.errors.OpError) as error:
        free = shutil.disk_usage(parent).free
        raise OSError(_full(directory, need, free)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(partial, records, spec):
    def serialize(*record):
        parts = keras.tree.flatten(record if len(record) > 1 else record[0])
        return tf.io.serialize_tensor(
            tf.stack([tf.io.serialize_tensor(part) for part in parts])
        )

    sizes = []
    with tf.io.TFRecordWriter(os.path.join(partial, _RECORDS)) as writer:
        for value in records.map(serialize).as_numpy_iterator():
            writer.write(value)
            sizes.append(len(value) + _FRAME)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    np.save(os.path.join(partial, _OFFSETS), offsets)
    with open(os.path.join(partial, _ABOUT), "w") as file:
        json.dump({"num_records": len(sizes), "spec": str(spec)}, file)


def _full(directory, need, free):
    return (
        "The cache could not be written; nothing of it is left behind. "
        f"Received: cache {directory}, which takes {need} bytes, and {free} "
        "bytes free on its disk. Use another `cache_dir`, or cache='none'."
    )


def _sweep(directory):
    """Removes what killed runs of this host have left unfinished."""
    begin = f"{os.path.basename(directory)}.partial-{socket.gethostname()}-"
    parent = os.path.dirname(directory)
    for name in os.listdir(parent) if os.path.isdir(parent) else ():
        pid = name.removeprefix(begin)
        if name.startswith(begin) and not _is_alive(int(pid)):
            shutil.rmtree(os.path.join(parent, name), ignore_errors=True)


def _is_alive(pid):
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's
    return True
