"""Arguments that make no sense; data that is empty, or of unequal parts."""

import collections

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from absl.testing import absltest
from absl.testing import parameterized

from tests.data import record_files
from tfscale import data


class ArgumentsTest(tf.test.TestCase, parameterized.TestCase):
    def _pipeline(self, **kwargs):
        kwargs.setdefault("batch_size", 2)
        return data.pipeline(data.arrays(np.arange(9)), **kwargs)

    @parameterized.parameters(
        {"batch_size": 0},
        {"batch_size": 2.0},
        {"batch_size": None},
        {"batch_size": True},
        {"shuffle": 0},
        {"shuffle": 8.0},
        {"prefetch": -2},
        {"prefetch": None},
        {"parallelism": 0},
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

    def test_options_of_tf_data_are_taken(self):
        options = tf.data.Options()
        options.deterministic = False
        options.threading.private_threadpool_size = 2
        pipeline = self._pipeline(options=options)
        found = pipeline.options()
        self.assertFalse(found.deterministic)
        self.assertEqual(found.threading.private_threadpool_size, 2)
        found = np.concatenate(list(pipeline.as_numpy_iterator()))
        self.assertCountEqual(found, range(9))
        self.assertTrue(self._pipeline().options().deterministic)
        # The options of the user are not changed.
        self.assertFalse(options.deterministic)

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

    def test_an_augment_that_returns_nothing(self):
        # It was an error of an attribute of tf.data.
        with self.assertRaisesRegex(TypeError, "`augment` must return"):
            self._pipeline(augment=lambda x, seed: None)

    def test_a_parse_that_returns_a_list(self):
        for batch in self._pipeline(parse=lambda x: [x, 2 * x]):
            self.assertAllEqual(2 * batch[0], batch[1])

    @parameterized.parameters("none", "memory")
    def test_lists_are_those_of_tf_data(self, cache):
        # Nested ones were refused, and an `augment` that returned a list had
        # its components stacked.
        pipeline = self._pipeline(
            parse=lambda x: {"a": [x, 2 * x], "b": (x, [[x], [-x]])},
            augment=lambda record, seed: [record["a"], record["b"][1]],
            shuffle=False,
            batch_size=9,
            cache=cache,
        )
        ((a, b),) = pipeline
        x = np.arange(9)
        self.assertAllEqual(a, np.stack([x, 2 * x], axis=1))
        self.assertAllEqual(b, np.stack([x, -x], axis=1)[..., None])

    @parameterized.parameters("none", "memory")
    def test_a_named_tuple_is_one_argument_as_in_tf_data(self, cache):
        # It was one when the first record was parsed, and several later.
        pair = collections.namedtuple("pair", ["a", "b"])
        source = data.arrays(pair(np.arange(4), np.ones(4)))
        (batch,) = data.pipeline(
            source,
            batch_size=4,
            parse=lambda record: record._replace(b=record.a + 1),
            augment=lambda record, seed: record._replace(a=record.b),
            shuffle=False,
            cache=cache,
        )
        self.assertAllEqual(batch.a, [1, 2, 3, 4])

    def test_ragged_records_are_made_dense_by_parse(self):
        # Their size was not known, which was an error of another kind.
        ragged = tf.ragged.constant([[1], [2, 3]])
        source = data.dataset(tf.data.Dataset.from_tensors(ragged).repeat(3))
        with self.assertRaisesRegex(TypeError, "to_tensor"):
            data.pipeline(source, batch_size=3)
        (batch,) = data.pipeline(
            source, batch_size=3, parse=lambda x: x.to_tensor(shape=[2, 2])
        )
        self.assertAllEqual(batch, [[[1, 0], [2, 3]]] * 3)

    @parameterized.parameters(-(2**31) - 1, 2**31)
    def test_a_token_of_more_than_32_bits(self, token):
        # It became another one.
        with self.assertRaisesRegex(ValueError, f"32 bits.*{token}"):
            data.tokens([0, token, 0], length=1)
        path = self.create_tempfile(content="text").full_path
        with self.assertRaisesRegex(ValueError, f"32 bits.*{path}"):
            data.text(path, 1, tokenizer=lambda _: np.array([0, token]))

    @parameterized.parameters((0, 8), (8, -1), (8,))
    def test_a_size_of_images_that_is_none(self, *size):
        with self.assertRaisesRegex(ValueError, "`image_size` must be"):
            data.image_folder("nothing", image_size=size)

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
            self.assertCountEqual(record_files.values(pipeline), range(7))

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
        empty = record_files.shard(self.create_tempdir().full_path, count=0)
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
        source = data.tfrecords(record_files.shard(folder))
        # The worker without a file was told of an array to concatenate.
        for worker in range(2):
            context = tf.distribute.InputContext(2, worker, 2)
            with self.assertRaisesRegex(ValueError, "2 workers; . of them"):
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

    def test_padding_has_weight_0_in_weights_of_any_structure(self):
        # A dict of them was an AttributeError. Those of time steps were
        # multiplied along the wrong dimension, with no error in a square.
        steps = 1.0 + np.arange(12.0).reshape(4, 3)
        source = data.arrays(
            np.arange(4), np.arange(4), {"a": np.ones(4), "b": steps}
        )
        first, last = data.pipeline(
            source, batch_size=3, shuffle=False, remainder="pad"
        )
        self.assertAllEqual(first[2]["b"], steps[:3])
        self.assertAllEqual(last[2]["b"], [steps[3], [0] * 3, [0] * 3])
        self.assertAllEqual(last[2]["a"], [1, 0, 0])

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


if __name__ == "__main__":
    absltest.main()
