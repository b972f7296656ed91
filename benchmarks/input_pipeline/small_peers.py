"""Grain and torch on tasks of small records, as their pages do it.

A record is parsed by Python, one by one: bytes to a row of uint8, and a
`tf.train.Example` to a dict. Grain reads ArrayRecord files. Torch reads one
file in which it knows each record's place, without a look at any checksum: the
least that it can be asked for.

Their worker processes are started once, before anything is measured: each
imports what the program has imported, which takes seconds. What they have read
ahead by the time that their next epoch begins is a few batches: Grain's default
of 500 would be more than an epoch, read while others are measured.
"""

import functools
import itertools
import os

import grain.python as grain
import numpy as np
import tensorflow as tf
import torch
from array_record.python import array_record_module

from benchmarks.input_pipeline import small_contestants
from benchmarks.input_pipeline.small_contestants import BATCH_SIZE
from benchmarks.input_pipeline.small_contestants import RECORD_BYTES

WORKERS = (0, 1, 2)
_READ_AHEAD = 16  # batches; as many threads read them


class _File(torch.utils.data.Dataset):
    def __init__(self, path, records, parse):
        self._sizes = [len(record) for record in records]
        self._begins = [0, *itertools.accumulate(self._sizes)]
        self._parse = parse
        with open(path, "wb") as file:
            file.writelines(records)
        self._file = os.open(path, os.O_RDONLY)  # workers inherit it

    def __len__(self):
        return len(self._sizes)

    def __getitem__(self, index):
        return self._parse(
            os.pread(self._file, self._sizes[index], self._begins[index])
        )


def _grain(path, parse, num_workers):
    source = grain.ArrayRecordDataSource(path)
    dataset = grain.MapDataset.source(source).shuffle(seed=0).map(parse)
    dataset = dataset.batch(BATCH_SIZE)
    num_batches = len(dataset)
    dataset = dataset.repeat().to_iter_dataset(
        grain.ReadOptions(prefetch_buffer_size=_READ_AHEAD)
    )
    if num_workers:
        dataset = dataset.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=num_workers)
        )
    batches = iter(dataset)
    return lambda: itertools.islice(batches, num_batches)


def _peers(folder, records, parse):
    one_file = _File(os.path.join(folder, parse.__name__), records, parse)
    path = os.path.join(folder, f"{parse.__name__}.array_record")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    peers = {}
    for workers in WORKERS:
        loader = torch.utils.data.DataLoader(
            one_file,
            batch_size=BATCH_SIZE,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        peers[f"torch, {workers} workers"] = functools.partial(iter, loader)
        peers[f"Grain, {workers} workers"] = _grain(path, parse, workers)
    return peers


def _row(record):
    return np.frombuffer(record, np.uint8).copy()  # torch wants to write


def _of_bytes(folder, count):
    random = np.random.default_rng(0)
    return _peers(
        folder, [random.bytes(RECORD_BYTES) for _ in range(count)], _row
    )


def _features(record):
    features = tf.train.Example.FromString(record).features.feature
    return {
        "x": np.array(features["x"].float_list.value, np.float32),
        "y": features["y"].int64_list.value[0],
    }


def _of_examples(folder, count):
    records = [small_contestants.example(number) for number in range(count)]
    return _peers(folder, records, _features)


# By task, a function from a folder and the number of records to a dict from
# name to a function that begins an epoch.
TASKS = {"bytes": _of_bytes, "examples": _of_examples}
