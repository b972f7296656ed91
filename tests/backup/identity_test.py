"""What differs where variables do not is found, and what need not is not."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfscale.backup import identity
from tfscale.backup.state import data_position


def described(
    name="first",
    rate=0.1,
    dtype=None,
    trainable=True,
    optimizer=None,
    **arguments,
):
    layers = [
        keras.layers.Dense(3, name=name, dtype=dtype),
        keras.layers.Dropout(rate),
        keras.layers.Dense(3, trainable=trainable),
        keras.layers.Dense(3, trainable=not trainable),
    ]
    model = keras.Sequential([keras.Input((3,)), *layers])
    arguments = {"loss": "mse", "metrics": ["mae"], **arguments}
    model.compile(keras.optimizers.Adam(**(optimizer or {})), **arguments)
    return identity.configuration(model)


class ConfigurationTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (dict(name="other"), 'name "other", saved "first"'),
        (dict(rate=0.5), "rate 0.5, saved 0.1"),
        (dict(dtype="mixed_bfloat16"), '"mixed_bfloat16", saved "float32"'),
        (dict(trainable=False), "trainable false, saved true"),
        (dict(optimizer={"weight_decay": 0.1}), "weight_decay 0.1, saved null"),
        (dict(optimizer={"beta_1": 0.5}), "beta_1 0.5, saved 0.9"),
        (dict(loss="mae"), 'compiled/loss "mae", saved "mse"'),
        (dict(metrics=["mse"]), 'compiled/metrics/0 "mse", saved "mae"'),
        (dict(metrics=[]), "compiled/metrics of 0, saved 1"),
    )
    def test_what_differs_is_named(self, other, expected):
        found = identity.difference(described(**other), described())
        self.assertIn(expected, found)

    @parameterized.parameters(
        {},
        dict(optimizer={"learning_rate": 0.5}),  # the backup has it
        dict(run_eagerly=True),
        dict(steps_per_execution=3),
    )
    def test_another_run_of_a_program_is_the_same(self, **other):
        # Numbers in names are others: the process has made other models.
        self.assertEqual(described(), described(**other))

    def test_inputs_of_models_that_are_no_sequence_are_compared(self):
        def described(dtype):
            inputs = keras.Input((3,), dtype=dtype)
            model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
            model.compile("sgd", "mse")
            return identity.configuration(model)

        found = identity.difference(described("float16"), described("float32"))
        self.assertIn('"float16", saved "float32"', found)

    def test_lambdas_are_not_compared_by_where_they_are(self):
        model = keras.Sequential([keras.layers.Lambda(lambda x: x)])
        model.compile("sgd", lambda y, p: y - p)
        self.assertNotIn("identity_test", identity.configuration(model))

    def test_configs_need_not_be_json(self):
        """Nor is a class that overrides `compile` equal to all others."""

        class Own(keras.Model):
            def __init__(self, table):
                super().__init__()
                self.table = np.asarray(table)

            def get_config(self):
                return {"table": self.table}

            def compile(self, optimizer):
                super().compile(optimizer)

        def described(table=(1, 2), momentum=0.0):
            model = Own(table)
            model.compile(keras.optimizers.SGD(0.1, momentum=momentum))
            return identity.configuration(model)

        self.assertEqual(described(), described())
        found = identity.difference(described(table=(1, 3)), described())
        self.assertRegex(found, r"model/config/table .int64\[2\]")
        found = identity.difference(described(momentum=0.5), described())
        self.assertIn("momentum 0.5, saved 0.0", found)

    def test_a_dataset_is_described_by_its_integers(self):
        tf.random.set_seed(1)
        rows = tf.data.Dataset.range(8).shuffle(5, seed=3).batch(4)
        self.assertEqual(
            data_position.stages(rows.repeat(2))[1:],
            [
                "Shuffle[5, 1, 3]",
                "Batch[4]",
                "Repeat[2]",
            ],
        )

    def test_a_dataset_may_have_other_threads(self):
        """A run goes on where there are more processors, or fewer."""

        def described(threads):
            rows = tf.data.Dataset.range(8).map(lambda x: x, threads)
            rows = rows.interleave(
                tf.data.Dataset.from_tensors, 4, num_parallel_calls=threads
            )
            rows = rows.batch(2, num_parallel_calls=threads)
            return data_position.stages(rows.prefetch(threads))

        self.assertEqual(described(2), described(4))
        self.assertIn("ParallelBatch[2]", described(2))
        self.assertIn("ParallelInterleave[4, 1]", described(2))


if __name__ == "__main__":
    tf.test.main()
