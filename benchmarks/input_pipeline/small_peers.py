"""Grain and torch on the task of small records: bytes to rows of uint8.

Their worker processes are started once, before anything is measured: each
imports what the program has imported, which takes seconds.
"""

import functools
import itertools
import os

import grain.python as grain
import numpy as np
import torch
from array_record.python import array_record_module

from benchmarks.input_pipeline.small_contestants import BATCH_SIZE
from benchmarks.input_pipeline.small_contestants import RECORD_BYTES

WORKERS = (0, 1, 2)


def _parse(record):
    return np.frombuffer(record, np.uint8)


class _Memory(torch.utils.data.Dataset):
    """Records of a file in memory: the least that torch can be asked for."""

    def __init__(self, path):
        self._rows = np.memmap(path, np.uint8, "r").reshape(-1, RECORD_BYTES)

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return torch.from_numpy(np.array(self._rows[index]))


def _grain(path, num_workers):
    source = grain.ArrayRecordDataSource(path)
    dataset = grain.MapDataset.source(source).shuffle(seed=0).map(_parse)
    dataset = dataset.batch(BATCH_SIZE)
    num_batches = len(dataset)
    dataset = dataset.repeat().to_iter_dataset()
    if num_workers:
        dataset = dataset.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=num_workers)
        )
    batches = iter(dataset)
    return lambda: itertools.islice(batches, num_batches)


def of_bytes(folder, count):
    """A dict from name to a function that begins an epoch."""
    random = np.random.default_rng(0)
    rows = os.path.join(folder, "rows.bin")
    records = os.path.join(folder, "records.array_record")
    writer = array_record_module.ArrayRecordWriter(records, "group_size:1")
    with open(rows, "wb") as file:
        for _ in range(count):
            record = random.bytes(RECORD_BYTES)
            file.write(record)
            writer.write(record)
    writer.close()
    peers = {}
    for workers in WORKERS:
        loader = torch.utils.data.DataLoader(
            _Memory(rows),
            batch_size=BATCH_SIZE,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        peers[f"torch, {workers} workers"] = functools.partial(iter, loader)
        peers[f"Grain, {workers} workers"] = _grain(records, workers)
    return peers
