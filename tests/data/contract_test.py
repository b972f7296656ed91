"""What every source promises, as a table: a new builder adds a row."""

import dataclasses
import functools
import io
import itertools
import json
import os
import tarfile
import tempfile

import datasets
import keras
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized
from array_record.python import array_record_module

from tfscale import data

_N = 37  # not a multiple of any batch size below
_FILES = 5


@functools.cache
def _folder():
    """Files of every kind, each with the records 0 to 36."""
    folder = tempfile.mkdtemp()
    shares = np.array_split(np.arange(_N), _FILES)
    for number, share in enumerate(shares):
        path = os.path.join(folder, str(number))
        with tf.io.TFRecordWriter(f"{path}.tfrecord") as writer:
            for record in share:
                writer.write(str(record).encode())
        with tf.io.TFRecordWriter(f"{path}.gz", "GZIP") as writer:
            for record in share:
                writer.write(str(record).encode())
        records = array_record_module.ArrayRecordWriter(
            f"{path}.array_record", "group_size:1"
        )
        for record in share:
            records.write(str(record).encode())
        records.close()
        table = pyarrow.table(
            {"number": share, "name": [f"a{number}" for number in share]}
        )
        pyarrow.parquet.write_table(table, f"{path}.parquet", row_group_size=3)
        with open(f"{path}.jsonl", "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in table.to_pylist())
        with tarfile.open(f"{path}.tar", "w") as archive:
            for record in share:
                for extension in ("txt", "cls"):
                    member = tarfile.TarInfo(f"{record}.{extension}")
                    contents = str(record).encode()
                    member.size = len(contents)
                    archive.addfile(member, io.BytesIO(contents))
        with open(f"{path}.csv", "w") as file:
            file.write("name,number\n")
            file.writelines(f'"a\n{record}",{record}\n' for record in share)
    for record in range(_N):
        name = os.path.join(folder, "images", f"{record % 3}", f"{record:02}")
        os.makedirs(os.path.dirname(name), exist_ok=True)
        picture = np.full((2, 2, 1), record, np.uint8)
        tf.io.write_file(f"{name}.png", tf.io.encode_png(picture))
        with open(os.path.join(folder, f"{record}.file"), "w") as file:
            file.write(str(record))
    with open(os.path.join(folder, "text"), "wb") as file:
        file.write(bytes(range(_N + 1)))
    return folder


def _in(name):
    return os.path.join(_folder(), name)


def _number(contents, *_):
    return tf.strings.to_number(contents, tf.int64)


# Builder, a parse that brings out the record's number, and one of batches.
SOURCES = {
    "arrays": (lambda: data.arrays(np.arange(_N)), None),
    "arrays_parsed": (
        lambda: data.arrays(np.arange(_N)),
        lambda x: tf.cast(x, tf.int64),
    ),
    "files": (lambda: data.files(_in("*.file")), _number),
    "tfrecords": (lambda: data.tfrecords(_in("*.tfrecord")), _number),
    "gzip": (lambda: data.tfrecords(_in("*.gz"), compression="GZIP"), _number),
    "csv": (
        lambda: data.csv(_in("*.csv"), dtypes={"number": "int64"}),
        lambda record: record["number"],
    ),
    "image_folder": (
        lambda: data.image_folder(_in("images"), num_channels=1),
        lambda image, label: tf.cast(image[0, 0, 0], tf.int64),
    ),
    "text": (
        lambda: data.text(_in("text"), length=1),
        lambda x, y: tf.cast(x[0], tf.int64),
    ),
    "dataset": (lambda: data.dataset(tf.data.Dataset.range(_N)), None),
    "array_records": (
        lambda: data.array_records(_in("*.array_record")),
        _number,
    ),
    "parquet": (
        lambda: data.parquet(_in("*.parquet")),
        lambda record: record["number"],
    ),
    "json_lines": (
        lambda: data.json_lines(_in("*.jsonl"), columns=["number"]),
        lambda record: record["number"],
    ),
    "webdataset": (
        lambda: data.webdataset(_in("*.tar"), extensions=["cls"]),
        lambda record: _number(record["cls"]),
    ),
    "hugging_face": (
        lambda: data.hugging_face(
            datasets.Dataset.from_dict(
                {"number": range(_N), "name": [str(n) for n in range(_N)]}
            )
        ),
        lambda record: record["number"],
    ),
    "pack": (
        lambda: data.pack([[number, 0] for number in range(_N)], length=1),
        lambda x, y, weight: tf.cast(x["tokens"][0], tf.int64),
    ),
    "mix": (
        lambda: data.mix(
            {
                "early": (data.arrays(np.arange(20)), 0.7),
                "late": (data.arrays(np.arange(20, _N)), 0.3),
            },
            exhausted="renormalize",
        ),
        None,
    ),
    "arrays_by_batch": (
        lambda: data.arrays(np.arange(_N)),
        None,
        lambda x: tf.cast(x, tf.int64),
    ),
    "tfrecords_by_batch": (
        lambda: data.tfrecords(_in("*.tfrecord")),
        _number,
        _number,
    ),
    "dataset_by_batch": (
        lambda: data.dataset(tf.data.Dataset.range(_N)),
        None,
        lambda x: x + 0,
    ),
}
_CACHES = ("memory", "file")
_REMAINDERS = ("keep", "drop", "pad")
WINDOWED = (
    "tfrecords",
    "gzip",
    "csv",
    "parquet",
    "json_lines",
    "webdataset",
    "dataset",
    "tfrecords_by_batch",
    "dataset_by_batch",
)
SPLIT = (
    "files",
    "tfrecords",
    "gzip",
    "csv",
    "image_folder",
    "array_records",
    "parquet",
    "json_lines",
    "webdataset",
    "tfrecords_by_batch",
)


def _with_each(names, values):
    """Each name with one of the values, in turn; the first has all of them.

    What makes batches of records does not know which source they are from.
    """
    first, *others = names
    yield from ((first, value) for value in values)
    yield from zip(others, itertools.cycle(values))


def _pair(number, seed):
    """The record, and a number drawn for it: (x, y) as models take it."""
    return number, tf.random.stateless_uniform([], seed)


def _pipeline(name, **kwargs):
    """A pipeline at the beginning of its first epoch.

    To build one takes longer than to read it, and it has no state but its
    position and its cache: one without a cache serves many tests.
    """
    if "cache" in kwargs:
        return _built.__wrapped__(name, **kwargs)
    pipeline = _built(name, **kwargs)
    pipeline.position.assign(seed=kwargs.get("seed", 0), epoch=0, index=0)
    return pipeline


@functools.cache
def _built(name, *, workers=1, worker=0, replicas=None, **kwargs):
    make, parse, *parse_batch = SOURCES[name]
    kwargs.setdefault("augment", _pair)
    kwargs.setdefault("cache", "none")
    if name in WINDOWED and kwargs.get("shuffle", True) is True:
        kwargs["shuffle"] = 16
    return data.pipeline(
        make(),
        parse=parse,
        parse_batch=parse_batch[0] if parse_batch else None,
        input_context=tf.distribute.InputContext(
            workers, worker, replicas or workers
        ),
        **kwargs,
    )


def _batches(pipeline):
    return list(pipeline.as_numpy_iterator())


def _real(batches):
    """Numbers of the records that are not padding, in order."""
    return [
        int(number)
        for x, _, *weight in batches
        for number, real in zip(x, weight[0] if weight else np.ones(len(x)))
        if real
    ]


def _joined(batches_of_workers):
    """Global batches out of those of the workers."""
    return [
        tuple(np.concatenate(parts) for parts in zip(*batches))
        for batches in zip(*batches_of_workers, strict=True)
    ]


class ContractTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        *((*row, 8) for row in _with_each(SOURCES, _REMAINDERS)),
        *itertools.product(("arrays", "tfrecords"), ("keep", "drop"), (1, 37)),
    )
    @pytest.mark.crossing(every=15)
    def test_each_record_once_an_epoch(self, name, remainder, batch_size):
        pipeline = _pipeline(name, batch_size=batch_size, remainder=remainder)
        first, second = _batches(pipeline), _batches(pipeline)
        whole = _N // batch_size * batch_size
        expected = whole if remainder == "drop" else _N
        for epoch in (first, second):
            self.assertLen(epoch, int(pipeline.cardinality()))
            self.assertLen(_real(epoch), expected)
            self.assertLen(set(_real(epoch)), expected)
            sizes = {len(x) for x, *_ in epoch}
            if remainder != "keep":
                self.assertEqual(sizes, {batch_size})
        self.assertNotEqual(_real(first), _real(second))
        self.assertEqual(pipeline.position.value, (0, 2, 0))

    @parameterized.parameters(*SOURCES)
    @pytest.mark.crossing(every=7)
    def test_order_without_shuffle_is_the_sources(self, name):
        pipeline = _pipeline(name, batch_size=4, shuffle=False)
        order = _real(_batches(pipeline))
        if name in ("files", "image_folder", "mix"):
            self.assertCountEqual(order, range(_N))
        else:
            self.assertEqual(order, list(range(_N)))

    @parameterized.parameters(
        *((*row, 2) for row in _with_each(SOURCES, _REMAINDERS)),
        *itertools.product(("arrays", "tfrecords"), ("keep", "pad"), (4,)),
    )
    @pytest.mark.crossing(every=25)
    def test_same_order_at_any_number_of_workers(
        self, name, remainder, workers
    ):
        kwargs = {"batch_size": 8, "remainder": remainder}
        alone = _batches(_pipeline(name, **kwargs))
        together = [
            _batches(_pipeline(name, workers=workers, worker=w, **kwargs))
            for w in range(workers)
        ]
        self.assertAllEqual(
            [len(batches) for batches in together], [len(alone)] * workers
        )
        for one, many in zip(alone, _joined(together), strict=True):
            keras.tree.map_structure(self.assertAllEqual, one, many)

    @parameterized.parameters(*SOURCES)
    @pytest.mark.crossing(every=20)
    def test_replicas_of_a_worker_share_its_slice(self, name):
        kwargs = {"batch_size": 8, "remainder": "pad"}
        alone = _batches(_pipeline(name, **kwargs))
        cut = _batches(_pipeline(name, replicas=2, **kwargs))
        self.assertLen(cut, 2 * len(alone))
        pairs = zip(cut[::2], cut[1::2], strict=True)
        for one, two in zip(alone, pairs, strict=True):
            joined = _joined([[two[0]], [two[1]]])[0]
            keras.tree.map_structure(self.assertAllEqual, one, joined)

    @parameterized.parameters(*_with_each(SPLIT, ("drop", "pad")))
    @pytest.mark.crossing(every=11)
    def test_workers_with_files_of_their_own_have_equal_batches(
        self, name, remainder
    ):
        kwargs = {"batch_size": 8, "shard": "files", "remainder": remainder}
        workers = [
            _batches(_pipeline(name, workers=2, worker=w, **kwargs))
            for w in range(2)
        ]
        self.assertLen(workers[0], len(workers[1]))
        records = _real(workers[0] + workers[1])
        self.assertLen(set(records), len(records))
        if remainder == "pad":
            self.assertCountEqual(records, range(_N))

    @parameterized.parameters(*_with_each(SOURCES, _REMAINDERS))
    @pytest.mark.crossing(every=11)
    def test_resume_at_every_batch_is_the_uninterrupted_rest(
        self, name, remainder
    ):
        pipeline = _pipeline(name, batch_size=8, remainder=remainder, seed=3)
        pipeline.position.assign(epoch=2)
        whole = _batches(pipeline)
        for stop in range(len(whole)):
            # A new process: nothing but the three integers goes over.
            pipeline.position.assign(seed=3, epoch=2, index=8 * stop)
            rest = _batches(pipeline)
            self.assertLen(rest, len(whole) - stop)
            for one, other in zip(whole[stop:], rest, strict=True):
                keras.tree.map_structure(self.assertAllEqual, one, other)
            self.assertEqual(pipeline.position.value, (3, 3, 0))

    @parameterized.parameters(*SOURCES)
    @pytest.mark.crossing(every=20)
    def test_resume_in_a_new_pipeline_and_with_other_workers(self, name):
        kwargs = {"batch_size": 4, "remainder": "drop"}
        whole = _batches(_pipeline(name, seed=3, **kwargs))
        workers = [
            _pipeline(name, seed=9, workers=2, worker=w, **kwargs)
            for w in range(2)
        ]
        for pipeline in workers:
            pipeline.position.assign(seed=3, epoch=0, index=12)
        rest = _joined([_batches(pipeline) for pipeline in workers])
        for one, other in zip(whole[3:], rest, strict=True):
            keras.tree.map_structure(self.assertAllEqual, one, other)

    @parameterized.parameters(
        # A mixture is not cached, and says so.
        *itertools.product((n for n in SOURCES if n != "mix"), _CACHES)
    )
    @pytest.mark.crossing(every=36)
    def test_a_cache_changes_nothing(self, name, cache):
        plain = _pipeline(name, batch_size=8)
        cached = _pipeline(
            name,
            batch_size=8,
            cache=cache,
            cache_dir=self.create_tempdir().full_path,
        )
        for _ in range(2):
            for one, other in zip(
                _batches(plain), _batches(cached), strict=True
            ):
                keras.tree.map_structure(self.assertAllEqual, one, other)
        cached.position.assign(epoch=0, index=16)
        plain.position.assign(epoch=0, index=16)
        for one, other in zip(_batches(plain), _batches(cached), strict=True):
            keras.tree.map_structure(self.assertAllEqual, one, other)

    def test_a_second_resume_in_one_epoch(self):
        pipeline = _pipeline("tfrecords", batch_size=4)
        whole = _batches(pipeline)
        taken = []
        for begin, end in ((0, 3), (3, 5), (5, len(whole))):
            pipeline.position.assign(epoch=0, index=4 * begin)
            taken += list(pipeline.take(end - begin).as_numpy_iterator())
        for one, other in zip(whole, taken, strict=True):
            keras.tree.map_structure(self.assertAllEqual, one, other)

    def test_another_seed_is_another_order(self):
        orders = {
            tuple(_real(_batches(_pipeline("arrays", batch_size=8, seed=s))))
            for s in range(4)
        }
        self.assertLen(orders, 4)

    @parameterized.parameters("dataset", "tfrecords")
    @pytest.mark.crossing(every=2)
    def test_order_does_not_depend_on_global_seeds(self, name):
        orders = []
        for seed in (1, 2):
            keras.utils.set_random_seed(seed)
            made_anew = _pipeline(name, batch_size=8, cache="none")
            orders.append(_real(_batches(made_anew)))
        self.assertEqual(*orders)

    def test_the_end_of_an_epoch_is_the_beginning_of_the_next(self):
        pipeline = _pipeline("arrays", batch_size=8, remainder="drop")
        _batches(pipeline)
        second = _real(_batches(pipeline))
        pipeline.position.assign(epoch=0, index=32)
        self.assertEqual(_real(_batches(pipeline)), second)

    def test_a_look_at_a_batch_begins_an_epoch(self):
        pipeline = _pipeline("arrays", batch_size=8)
        for epoch in (1, 2, 3):
            next(iter(pipeline))
            self.assertEqual(pipeline.position.value, (0, epoch, 0))

    def test_a_map_of_the_user_knows_the_cardinality(self):
        for name in ("arrays", "tfrecords"):
            pipeline = _pipeline(name, batch_size=8)
            mapped = pipeline.map(lambda x, y: x).prefetch(1)
            self.assertEqual(mapped.cardinality(), 5)

    @pytest.mark.crossing
    def test_a_changed_window_is_a_changed_order_of_the_same_records(self):
        kwargs = {"batch_size": 8}
        small = _real(_batches(_pipeline("csv", shuffle=8, **kwargs)))
        large = _real(_batches(_pipeline("csv", shuffle=99, **kwargs)))
        self.assertCountEqual(small, large)
        self.assertNotEqual(small, large)


class RecipeTest(absltest.TestCase):
    def test_a_recipe_can_be_read_and_varied(self):
        recipe = _pipeline("arrays", batch_size=8).recipe
        self.assertEqual(recipe.cache_kind, "none")
        self.assertFalse(dataclasses.replace(recipe, shuffle=False).shuffle)


if __name__ == "__main__":
    absltest.main()
