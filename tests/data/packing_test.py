"""Graphs do not grow with the columns of a table."""

import collections
import os

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale import data
from tfscale.data.packing import Packing

# Of each output of a function, and of small tensors.
_OF_OUTPUTS = ("Const", "Identity", "Placeholder", "NoOp")


def _columns(count):
    return {f"c{n}": np.arange(9, dtype=np.float32) + n for n in range(count)}


def _arrays(path, count):
    del path
    return data.arrays(_columns(count))


def _csv(path, count):
    columns = _columns(count)
    with open(path, "w") as file:
        file.write(",".join(columns) + "\n")
        for row in zip(*columns.values()):
            file.write(",".join(map(str, row)) + "\n")
    return data.csv(path, dtypes=dict.fromkeys(columns, "float32"))


def _json_lines(path, count):
    table = pyarrow.table(_columns(count))
    with open(path, "w") as file:
        for row in table.to_pylist():
            file.write(str(row).replace("'", '"') + "\n")
    return data.json_lines(path)


def _parquet(path, count):
    pyarrow.parquet.write_table(pyarrow.table(_columns(count)), path)
    return data.parquet(path)


def _hugging_face(path, count):
    del path
    return data.hugging_face(datasets.Dataset.from_dict(_columns(count)))


_SOURCES = (_arrays, _csv, _json_lines, _parquet, _hugging_face)
_CACHES = ("memory", "file")


def _operations(dataset):
    """Types of the operations of all functions of a dataset, in order."""
    found, todo = [], [dataset]
    while todo:
        one = todo.pop()
        todo += one._inputs()
        for function in one._functions():
            graph = function.function.graph
            found += [op.type for op in graph.get_operations()]
            found += [
                node.op
                for inner in graph.as_graph_def().library.function
                for node in inner.node_def
            ]
    return [kind for kind in found if kind not in _OF_OUTPUTS]


class PackingTest(tf.test.TestCase, parameterized.TestCase):
    # Caches keep the records of any source.
    @parameterized.parameters(
        *((make, "none") for make in _SOURCES),
        *((_arrays, cache) for cache in _CACHES),
    )
    def test_graphs_do_not_grow_with_columns(self, make, cache):
        # To the first batch of 300 columns it took 12 seconds.
        self.check_graphs_do_not_grow(make, cache)

    @parameterized.product(make=_SOURCES[1:], cache=_CACHES)
    @pytest.mark.crossing
    def test_graphs_of_caches_of_each_source(self, make, cache):
        self.check_graphs_do_not_grow(make, cache)

    def check_graphs_do_not_grow(self, make, cache):
        folder = self.create_tempdir().full_path
        found = []
        for count in (5, 40):
            source = make(os.path.join(folder, str(count)), count)
            pipeline = data.pipeline(
                source,
                batch_size=4,
                shuffle=False,
                cache=cache,
                cache_dir=folder,
            )
            for _ in range(2):
                batches = pipeline.as_numpy_iterator()
                rows = [np.stack(list(b.values()), 1) for b in batches]
                wanted = np.stack(list(_columns(count).values()), 1)
                self.assertAllEqual(np.concatenate(rows), wanted)
            found.append(collections.Counter(_operations(pipeline)))
        self.assertEqual(*found)

    def test_records_and_batches_of_several_dtypes(self):
        record = {
            "a": tf.constant(1.0),
            "b": (tf.constant(2), tf.constant([3.0, 4.0])),
            "c": tf.constant(5.0),
            "d": tf.constant("x"),
        }
        spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, record)
        packing = Packing(spec)
        self.assertEqual(packing.specs[0].shape, [2])
        self.assertLen(packing.specs, 4)
        batch = tf.nest.map_structure(lambda t: tf.stack([t, t, t]), record)
        for one in (record, batch):
            found = packing.unpack(packing.pack(one))
            self.assertEqual(list(found), list(one))
            tf.nest.map_structure(self.assertAllEqual, found, one)


if __name__ == "__main__":
    absltest.main()
