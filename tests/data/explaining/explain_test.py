"""`explain` must name what was planted, in the user's words."""

import dataclasses
import json
import os
import time

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale import data

_BATCH = 8
_SECONDS = 0.4


def _sleepy(milliseconds):
    """A map that takes its time without taking a core."""

    def sleep(number):
        time.sleep(milliseconds / 1e3)
        return number

    def slow(number):
        slept = tf.numpy_function(sleep, [number], tf.int64)
        return tf.ensure_shape(slept, [])

    return slow


def _busy(number):
    """A map that takes some milliseconds of a core."""
    start = _float(number) * 1e-6
    matrix = tf.fill([128, 128], start)
    for _ in range(48):
        matrix = tf.tanh(tf.matmul(matrix, matrix))
    return number + tf.cast(matrix[0, 0], tf.int64)


def _float(number):
    return tf.cast(number, tf.float32)


def _range():
    return tf.data.Dataset.range(100_000)


def _slow_file(folder, milliseconds):
    """Reading, in which each record is late."""
    names = [os.path.join(folder, str(n)) for n in range(4)]
    for name in names:
        with tf.io.TFRecordWriter(name) as writer:
            for number in range(200):
                writer.write(str(number).encode())

    def read(name):
        records = tf.data.TFRecordDataset(name)
        numbers = records.map(lambda r: tf.strings.to_number(r, tf.int64))
        return numbers.map(_sleepy(milliseconds))

    return tf.data.Dataset.from_tensor_slices(names), read


def _best(explanation):
    return explanation.suggestions[0]


class PlantedBottleneckTest(tf.test.TestCase, parameterized.TestCase):
    @pytest.mark.crossing
    def test_a_slow_parse_that_is_sequential(self):
        dataset = _range().map(_sleepy(2)).batch(_BATCH).prefetch(2)
        explanation = data.explain(dataset, seconds=_SECONDS)
        self.assertEqual(explanation.bottleneck, "map")
        texts = [s.text for s in explanation.suggestions if s.gain > 1.3]
        self.assertIn("num_parallel_calls=AUTOTUNE for the map", texts)

    def test_a_slow_parse_with_too_little_parallelism(self):
        dataset = (
            _range()
            .map(_sleepy(2), num_parallel_calls=1)
            .batch(_BATCH)
            .prefetch(tf.data.AUTOTUNE)
        )
        explanation = data.explain(dataset, seconds=_SECONDS)
        self.assertEqual(explanation.bottleneck, "parallel map")
        texts = [s.text for s in explanation.suggestions if s.gain > 1.3]
        self.assertIn("num_parallel_calls=AUTOTUNE for the parallel map", texts)

    def test_a_slow_read_from_one_file_at_a_time(self):
        names, read = _slow_file(self.create_tempdir().full_path, 2)
        dataset = (
            names.interleave(read, cycle_length=4)
            .map(lambda x: x + 1, num_parallel_calls=tf.data.AUTOTUNE)
            .batch(_BATCH)
            .prefetch(tf.data.AUTOTUNE)
        )
        explanation = data.explain(dataset, seconds=_SECONDS)
        self.assertEqual(explanation.bottleneck, "interleave")
        texts = [s.text for s in explanation.suggestions if s.gain > 1.3]
        self.assertIn("num_parallel_calls=AUTOTUNE for the interleave", texts)

    def test_no_prefetch(self):
        options = tf.data.Options()
        # tf.data would add one of its own accord.
        options.experimental_optimization.inject_prefetch = False
        # A map before `batch` would be fused with it, and run ahead.
        batches = _range().batch(_BATCH).map(lambda x: x[0])
        dataset = batches.map(_sleepy(16)).with_options(options)
        explanation = data.explain(dataset, seconds=_SECONDS)
        gains = {s.text: s.gain for s in explanation.suggestions}
        self.assertGreater(gains["prefetch(tf.data.AUTOTUNE) at the end"], 1.3)

    def test_a_prefetch_of_any_size_is_left_as_it_is(self):
        explanation = data.explain(
            _range().batch(_BATCH).prefetch(1), seconds=_SECONDS / 4
        )
        self.assertEmpty(explanation.suggestions)

    @parameterized.named_parameters(
        ("slow_parse", {"parse": _sleepy(2), "parallelism": 1}, "parse"),
        (
            "slow_augment",
            {"augment": lambda x, seed: _sleepy(2)(x), "parallelism": 1},
            "augment",
        ),
    )
    @pytest.mark.crossing(every=2)
    def test_a_stage_of_a_pipeline(self, kwargs, stage):
        with self.assertWarnsRegex(UserWarning, "python-function"):
            self._check_slow_stage(kwargs, stage)

    @pytest.mark.crossing
    def test_a_stage_that_takes_a_core(self):
        self._check_slow_stage({"parse": _busy, "parallelism": 1}, "parse")

    def _check_slow_stage(self, kwargs, stage):
        pipeline = data.pipeline(
            data.arrays(np.arange(100_000)),
            batch_size=_BATCH,
            cache="none",
            **kwargs,
        )
        explanation = data.explain(pipeline, seconds=_SECONDS)
        self.assertEqual(explanation.bottleneck, stage)
        texts = [s.text for s in explanation.suggestions]
        self.assertIn("parallelism=tf.data.AUTOTUNE", texts)
        self.assertEqual(pipeline.position.value, (0, 0, 0))

    @pytest.mark.crossing
    def test_a_cache_of_a_pipeline_is_tried_and_ranked_first(self):
        pipeline = data.pipeline(
            data.arrays(np.arange(100_000)),
            parse=_busy,
            batch_size=_BATCH,
            cache="none",
        )
        best = _best(data.explain(pipeline, seconds=_SECONDS))
        self.assertStartsWith(best.text, "cache='memory'")
        self.assertGreater(best.gain, 1.5)

    @pytest.mark.crossing
    def test_no_prefetch_of_a_pipeline(self):
        def lookup(index):
            slept = tf.numpy_function(_wait, [index], tf.int64)
            return tf.ensure_shape(slept, [None])

        def _wait(index):
            time.sleep(16e-3)
            return index

        source = dataclasses.replace(
            data.arrays(np.arange(100_000)), gather=lookup
        )
        pipeline = data.pipeline(
            source, batch_size=_BATCH, prefetch=0, parallelism=1
        )
        explanation = data.explain(pipeline, seconds=_SECONDS)
        gains = {s.text: s.gain for s in explanation.suggestions}
        self.assertGreater(gains["prefetch=tf.data.AUTOTUNE"], 1.3)


class DerivedTest(tf.test.TestCase):
    """A pipeline that the user has repeated and mapped."""

    @pytest.mark.crossing
    def test_its_position_stays_and_its_stages_are_left_alone(self):
        pipeline = data.pipeline(
            data.arrays(np.arange(32)), parse=lambda x: x + 1, batch_size=4
        )
        pipeline.position.assign(epoch=2, index=8)
        derived = pipeline.repeat().map(_float)
        data.benchmark(derived, seconds=0.1)
        self.assertEqual(pipeline.position.value, (0, 2, 8))
        explanation = data.explain(derived, seconds=0.05)
        self.assertEqual(pipeline.position.value, (0, 2, 8))
        # The user's map and a prefetch, none of the pipeline's six maps.
        self.assertCountEqual(
            [suggestion.text for suggestion in explanation.suggestions],
            [
                "num_parallel_calls=AUTOTUNE for the map",
                "prefetch(tf.data.AUTOTUNE) at the end",
            ],
        )


class ExplanationTest(tf.test.TestCase):
    def test_as_table_and_as_data(self):
        dataset = tf.data.Dataset.range(99).map(lambda x: x + 1).batch(3)
        explanation = data.explain(dataset, seconds=0.05)
        text = str(explanation)
        for word in ("range", "map", "batch", "batches/s"):
            self.assertIn(word, text)
        found = json.loads(json.dumps(explanation.as_dict()))
        self.assertLen(found["stages"], 3)
        self.assertEqual(found["bottleneck"], explanation.bottleneck)

    def test_findings_of_the_lints_are_told(self):
        dataset = tf.data.Dataset.range(99).batch(3).shuffle(3)
        explanation = data.explain(dataset, seconds=0.05)
        self.assertEqual(explanation.findings[0].rule, "shuffle-after-batch")


class BenchmarkTest(tf.test.TestCase):
    def test_a_batch_takes_as_long_as_it_takes(self):
        dataset = tf.data.Dataset.range(1000).map(_sleepy(40))
        measured = data.benchmark(dataset, seconds=0.4)
        self.assertBetween(measured.seconds_per_batch, 0.040, 0.400)

    def test_a_warm_up_is_not_counted(self):
        def late(number):
            if number < 5:
                time.sleep(0.1)
            return number

        dataset = tf.data.Dataset.range(10**9).map(
            lambda n: tf.numpy_function(late, [n], tf.int64)
        )
        measured = data.benchmark(dataset, seconds=0.2, warm_up_seconds=0.5)
        self.assertLess(measured.seconds_per_batch, 0.02)

    def test_a_short_dataset_is_begun_again(self):
        measured = data.benchmark(tf.data.Dataset.range(3), seconds=0.5)
        self.assertGreater(measured.num_batches, 3)

    def test_no_time_is_refused(self):
        for measure in (data.benchmark, data.explain):
            with self.assertRaisesRegex(ValueError, "`seconds`.*seconds=0"):
                measure(tf.data.Dataset.range(3), seconds=0)

    def test_one_that_is_used_up_is_refused(self):
        # It was begun again for ever, or until the time was over.
        left = iter(range(3))
        dataset = tf.data.Dataset.from_generator(
            lambda: left, output_signature=tf.TensorSpec([], tf.int64)
        )
        with self.assertRaisesRegex(ValueError, "must restart"):
            data.benchmark(dataset, seconds=0.1)

    def test_an_empty_one_is_refused(self):
        with self.assertRaisesRegex(ValueError, "without a batch"):
            data.benchmark(tf.data.Dataset.range(0))


if __name__ == "__main__":
    absltest.main()
