"""Grain and torch on tasks of small records, as their pages do it.

A record is parsed by Python, one by one: bytes to a row of uint8, and a
`tf.train.Example` to a dict. Grain reads ArrayRecord files; torch has the
records in memory already, the least that it can be asked for.

Their worker processes are started once, before anything is measured: each
imports what the program has imported, which takes seconds.
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


class _Memory(torch.utils.data.Dataset):
    def __init__(self, records, parse):
        self._records = records
        self._parse = parse

    def __len__(self):
        return len(self._records)

    def __getitem__(self, index):
        return self._parse(self._records[index])


def _grain(path, parse, num_workers):
    source = grain.ArrayRecordDataSource(path)
    dataset = grain.MapDataset.source(source).shuffle(seed=0).map(parse)
    dataset = dataset.batch(BATCH_SIZE)
    num_batches = len(dataset)
    dataset = dataset.repeat().to_iter_dataset()
    if num_workers:
        dataset = dataset.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=num_workers)
        )
    batches = iter(dataset)
    return lambda: itertools.islice(batches, num_batches)


def _peers(folder, records, parse):
    path = os.path.join(folder, f"{parse.__name__}.array_record")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    peers = {}
    for workers in WORKERS:
        loader = torch.utils.data.DataLoader(
            _Memory(records, parse),
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
