"""Each lint with the offending pipeline, and pipelines with nothing wrong."""

import functools
import warnings

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale import data


def _range():
    return tf.data.Dataset.range(20)


def _python(x):
    return tf.ensure_shape(tf.numpy_function(lambda y: y, [x], tf.int64), [])


def _stateful(x):
    return x + tf.random.uniform([], 0, 9, tf.int64)


def _stateless(x):
    return x + tf.random.stateless_uniform([], [0, x], 0, 9, tf.int64)


def _flip(x):
    return tf.image.random_flip_left_right(tf.fill([2, 2, 3], x))


@functools.cache
def _random_flip():
    with tf.init_scope():
        return keras.layers.RandomFlip()


def _layer(x):
    image = tf.fill([2, 2, 3], tf.cast(x, tf.float32))
    return _random_flip()(image, training=True)


def _crop(x):
    box, *_ = tf.image.stateless_sample_distorted_bounding_box(
        [8, 8, 3], tf.zeros([1, 1, 4]), [0, x]
    )
    return box


@tf.function
def _checked(x):
    tf.debugging.assert_less(x, tf.constant(100, tf.int64))
    return x


def _looked_up(x):
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.range(20), tf.range(20)), -1
    )
    return tf.function(table.lookup)(tf.cast(x, tf.int32))


OFFENDERS = {
    "random_then_cache": (
        lambda: _range().map(_stateless).cache(),
        ["cache-after-random"],
    ),
    "stateful_then_cache": (
        lambda: _range().map(_stateful).cache().batch(2),
        ["stateful-random", "cache-after-random"],
    ),
    "stateful": (lambda: _range().map(_stateful), ["stateful-random"]),
    "stateful_image": (
        lambda: _range().map(_flip, num_parallel_calls=2),
        ["stateful-random"],
    ),
    "stateful_layer": (
        lambda: _range().map(_layer).cache(),
        ["stateful-random", "cache-after-random"],
    ),
    "random_crop_then_cache": (
        lambda: _range().map(_crop).cache(),
        ["cache-after-random"],
    ),
    "branches_of_a_zip": (
        lambda: tf.data.Dataset.zip(
            _range().map(_stateful), _range().batch(2).shuffle(4)
        ).cache(),
        ["shuffle-after-batch", "stateful-random", "cache-after-random"],
    ),
    "one_branch_in_batches": (
        lambda: tf.data.Dataset.zip(_range().batch(2), _range()).shuffle(3),
        ["shuffle-after-batch"],
    ),
    "shuffle_after_batch": (
        lambda: _range().batch(2).shuffle(4),
        ["shuffle-after-batch"],
    ),
    "python_function": (lambda: _range().map(_python), ["python-function"]),
}

INNOCENTS = {
    "cache_then_random": lambda: _range().cache().map(_stateless),
    "shuffle_after_unbatch": lambda: _range().batch(2).unbatch().shuffle(4),
    "order_of_a_pipeline": lambda: data.pipeline(
        data.arrays(np.arange(20)),
        batch_size=2,
        parse=lambda x: x + 1,
        augment=lambda x, seed: (
            x + tf.random.stateless_uniform([], seed, 0, 9, tf.int64)
        ),
    ),
    # Functions with state that is not random.
    "checks": lambda: _range().map(lambda x: _checked(x)).cache(),
    "tables": lambda: _range().map(_looked_up).cache(),
    "windows": lambda: _range().window(3).shuffle(3),
    "zip": lambda: tf.data.Dataset.zip(_range(), _range()).shuffle(3),
}


class LintTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(
        (name, *case) for name, case in OFFENDERS.items()
    )
    def test_is_found(self, make, rules):
        findings = data.lint(make())
        self.assertEqual([finding.rule for finding in findings], rules)
        for finding in findings:
            self.assertNotEmpty(finding.fix)
            self.assertIn(finding.fix, str(finding))

    @parameterized.named_parameters(INNOCENTS.items())
    def test_is_not_found(self, make):
        self.assertEmpty(data.lint(make()))


class PipelineTest(tf.test.TestCase, parameterized.TestCase):
    def _pipeline(self, **kwargs):
        return data.pipeline(data.arrays(np.arange(20)), batch_size=2, **kwargs)

    @parameterized.parameters(_stateful, _stateless, _flip, _layer, _crop)
    def test_a_random_parse_is_refused(self, parse):
        with self.assertRaisesRegex(ValueError, "to `augment`"):
            self._pipeline(parse=parse)

    def test_an_augment_from_hidden_state_is_refused(self):
        with self.assertRaisesRegex(ValueError, "RandomUniformInt.*stateless"):
            self._pipeline(augment=lambda x, seed: _stateful(x))

    def test_an_augment_with_a_random_layer_is_refused(self):
        with self.assertRaisesRegex(ValueError, "into the model"):
            self._pipeline(augment=lambda x, seed: _layer(x))

    def test_functions_with_state_that_is_not_random_are_taken(self):
        # A tf.function that asserts, or looks something up, was taken for a
        # random one, because TensorFlow calls it stateful.
        for parse in (lambda x: _checked(x), _looked_up):
            self.assertLen(list(self._pipeline(parse=parse)), 10)

    @parameterized.parameters("parse", "augment")
    def test_a_python_function_is_warned_of(self, where):
        def function(x, seed=None):
            return _python(x)

        with self.assertWarnsRegex(UserWarning, "python-function"):
            self._pipeline(**{where: function})

    def test_a_dataset_in_another_order_every_time_is_warned_of(self):
        with self.assertWarnsRegex(UserWarning, "unstable-order.*`shuffle`"):
            data.pipeline(data.dataset(_range().shuffle(4)), batch_size=2)
        fixed = _range().shuffle(4, seed=1, reshuffle_each_iteration=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            data.pipeline(data.dataset(fixed), batch_size=2)

    def test_the_dataset_that_is_wrapped_is_looked_at(self):
        with self.assertWarnsRegex(UserWarning, "stateful-random"):
            data.pipeline(data.dataset(_range().map(_stateful)), batch_size=2)


if __name__ == "__main__":
    absltest.main()
