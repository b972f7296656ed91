"""A variable of which each model rank has a part is whole for its users."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tfscale.collectives import rank_collectives
from tfscale.variables.sharded_variable import ShardedVariable

LAYOUT = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}
RANDOM = np.random.RandomState(0)
KERNEL = RANDOM.normal(size=(12, 24)).astype("float32")


def build(units=24):
    inputs = keras.Input((12,))
    x = keras.layers.Dense(units, activation="relu", name="up")(inputs)
    return keras.Model(inputs, keras.layers.Dense(12, name="down")(x))


def on_mesh(data, model, units=24):
    same_numbers.reset()
    strategy = tfscale.MeshStrategy(
        tfscale.device_mesh(data=data, model=model), LAYOUT
    )
    with strategy.scope():
        return strategy, build(units)


def components(variable):
    return [np.array(v) for v in variable.value.values]


class ShardedVariableTest(tf.test.TestCase, parameterized.TestCase):
    def assert_parts(self, variable, value, num_ranks):
        """Each component is the part of the value that its rank has."""
        self.assertIsInstance(variable.value, ShardedVariable)
        parts = np.split(
            value, num_ranks, axis=variable.value.sharding.model_dim
        )
        found = components(variable)
        for index, component in enumerate(found):
            np.testing.assert_array_equal(component, parts[index % num_ranks])

    def test_scalars_and_sums_are_arrays_for_numpy(self):
        # Their `numpy()` is a number, which NumPy refused from `__array__`.
        _, mlp = on_mesh(2, 2)
        with mlp.variables[0].value.distribute_strategy.scope():
            rate = keras.optimizers.SGD(0.5).learning_rate
            total = keras.metrics.Sum().total
        for variable, value in ((rate, 0.5), (total, 0.0)):
            for array in (
                np.array(variable.value),
                keras.ops.convert_to_numpy(variable),
                keras.ops.convert_to_numpy(variable.value),
                np.asarray(variable.value, "float64"),
            ):
                self.assertIsInstance(array, np.ndarray)
                self.assertEqual(array, value)

    @parameterized.parameters((1, 2), (1, 3), (2, 2))
    @pytest.mark.crossing(every=3)
    def test_is_read_whole_in_the_scope_and_outside_of_it(self, data, model):
        strategy, mlp = on_mesh(data, model)
        kernel = mlp.get_layer("up").kernel
        kernel.assign(KERNEL)
        variable = kernel.value

        def check():
            for value in (
                variable.numpy(),
                variable.read_value(),
                variable.value(),
                tf.convert_to_tensor(variable),
                np.array(variable),
                np.array(kernel),
                kernel.numpy(),
                variable + 0.0,
                tf.gather(variable, tf.range(12)),
                variable[:],
                mlp.get_weights()[0],
            ):
                np.testing.assert_array_equal(value, KERNEL)
            for shape in (kernel.shape, variable.shape, variable.get_shape()):
                self.assertEqual(tuple(shape), (12, 24))

        check()
        with strategy.scope():
            check()
        self.assert_parts(kernel, KERNEL, model)

    def test_arithmetic_is_that_of_the_whole_value(self):
        strategy, mlp = on_mesh(2, 2)
        kernel = mlp.get_layer("up").kernel
        kernel.assign(KERNEL)
        ones = np.ones((24, 1), np.float32)

        def computed(x):
            return (
                *(2.0 * x - 1.0, 1.0 - x, abs(-x), x / 3.0, x**2, x @ ones),
                *(x > 1.0, x[1:3], x // 2.0, 3.0 % (x + 5.0), KERNEL + x),
            )

        found = strategy.run(lambda: computed(kernel.value))
        for one, here, wanted in zip(
            found, computed(kernel.value), computed(KERNEL), strict=True
        ):
            self.assertAllClose(here, wanted, 1e-6, 1e-6)
            for each in strategy.experimental_local_results(one):
                self.assertAllClose(each, wanted, 1e-6, 1e-6)

    def test_is_read_whole_by_replicas_and_in_part_by_rules(self):
        strategy, mlp = on_mesh(2, 2)
        kernel = mlp.get_layer("up").kernel
        kernel.assign(KERNEL)

        @tf.function(autograph=False)
        def read():
            with rank_collectives.local_shards():
                part = tf.convert_to_tensor(kernel)
                self.assertEqual(kernel.value.shape, (12, 12))
            whole = [
                tf.convert_to_tensor(kernel),
                kernel.value * 1.0,
                tf.gather(kernel.value, [1, 2]),
                tf.gather_nd(kernel.value, [[1, 3]]),
            ]
            return whole, part

        whole, part = strategy.run(read)
        expected = KERNEL, KERNEL, KERNEL[1:3], KERNEL[1, 3][None]
        for found, value in zip(whole, expected, strict=True):
            for of_replica in strategy.experimental_local_results(found):
                np.testing.assert_array_equal(of_replica, value)
        for of_replica in strategy.experimental_local_results(part):
            np.testing.assert_array_equal(of_replica, KERNEL[:, :12])

    @parameterized.parameters("outside", "scope", "function")
    def test_a_whole_value_is_assigned(self, place):
        strategy, mlp = on_mesh(2, 2)
        kernel = mlp.get_layer("down").kernel
        value = KERNEL.T.copy()
        if place == "outside":
            kernel.assign(value)
        elif place == "scope":
            with strategy.scope():
                kernel.value.assign(value)
        else:
            tf.function(lambda: kernel.value.assign(value))()
        self.assert_parts(kernel, value, 2)
        kernel.assign_add(np.ones_like(value))
        self.assert_parts(kernel, value + 1, 2)
        kernel.assign_sub(np.ones_like(value))
        self.assert_parts(kernel, value + 1 - 1, 2)

    def test_replicas_assign_the_whole_value(self):
        strategy, mlp = on_mesh(2, 2)
        kernel = mlp.get_layer("up").kernel

        @tf.function(autograph=False)
        def step():
            kernel.value.assign(tf.constant(KERNEL))
            kernel.value.assign_add(tf.ones((12, 24)))

        strategy.run(step)
        self.assert_parts(kernel, KERNEL + 1, 2)

    def test_rules_assign_their_part(self):
        strategy, mlp = on_mesh(1, 2)
        kernel = mlp.get_layer("up").kernel

        @tf.function(autograph=False)
        def step():
            with rank_collectives.local_shards():
                rank = tf.cast(rank_collectives.rank(), "float32")
                kernel.value.assign(tf.fill((12, 12), rank))

        strategy.run(step)
        expected = np.repeat([[0.0, 1.0]], 12, axis=0).repeat(12, axis=1)
        self.assert_parts(kernel, expected, 2)

    def test_a_value_of_another_shape_changes_nothing(self):
        strategy, mlp = on_mesh(2, 2)
        kernel = mlp.get_layer("up").kernel
        kernel.assign(KERNEL)
        with self.assertRaisesRegex(ValueError, "must match"):
            kernel.assign(KERNEL[:, :12])
        with self.assertRaisesRegex(ValueError, r"\(12, 12\).*not changed"):
            kernel.value.assign(KERNEL[:, :12])

        @tf.function(autograph=False)
        def step():
            kernel.value.assign(tf.constant(KERNEL[:, :12]))

        with self.assertRaisesRegex(ValueError, r"\(12, 12\).*not changed"):
            strategy.run(step)
        self.assert_parts(kernel, KERNEL, 2)

    @parameterized.parameters(True, False)
    def test_set_weights_takes_what_get_weights_gives(self, in_scope):
        _, source = on_mesh(1, 3)
        weights = [RANDOM.normal(size=w.shape) for w in source.get_weights()]
        weights = [w.astype("float32") for w in weights]
        strategy, target = on_mesh(2, 2)
        if in_scope:
            with strategy.scope():
                target.set_weights(weights)
        else:
            target.set_weights(weights)
        for value, weight in zip(target.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(value, weight)
        self.assert_parts(target.get_layer("up").kernel, weights[0], 2)
        self.assert_parts(target.get_layer("down").kernel, weights[2], 2)

    @parameterized.product(
        name=("w.weights.h5", "m.keras"),
        sizes=(((1, 2), (1, 3)), ((2, 2), (1, 4))),
    )
    @pytest.mark.crossing(every=4)
    def test_weights_are_saved_whole(self, name, sizes):
        path = os.path.join(self.create_tempdir(), name)
        (_, source), expected = on_mesh(*sizes[0]), None
        source.get_layer("up").kernel.assign(KERNEL)
        expected = source.get_weights()
        source.save(path) if name == "m.keras" else source.save_weights(path)
        _, target = on_mesh(*sizes[1])
        target.load_weights(path)
        for value, weight in zip(target.get_weights(), expected, strict=True):
            np.testing.assert_array_equal(value, weight)
        self.assert_parts(target.get_layer("up").kernel, KERNEL, sizes[1][1])

    def test_a_checkpoint_of_tensorflow_is_whole(self):
        strategy, source = on_mesh(1, 2)
        with strategy.scope():
            source.compile(keras.optimizers.Adam(0.01), "mse")
        source.fit(KERNEL.T[:12, :12], KERNEL.T[:12, :12], verbose=0)
        prefix = os.path.join(self.create_tempdir(), "c")
        path = tf.train.Checkpoint(
            model=source, optimizer=source.optimizer
        ).save(prefix)
        saved = {tuple(shape) for _, shape in tf.train.list_variables(path)}
        self.assertIn((12, 24), saved)
        self.assertNotIn((12, 12), saved)

        strategy, target = on_mesh(2, 3)
        with strategy.scope():
            target.compile(keras.optimizers.Adam(0.01), "mse")
            target.optimizer.build(target.trainable_variables)
        status = tf.train.Checkpoint(
            model=target, optimizer=target.optimizer
        ).restore(path)
        status.assert_existing_objects_matched()
        pairs = zip(
            source.variables + source.optimizer.variables,
            target.variables + target.optimizer.variables,
            strict=True,
        )
        for one, other in pairs:
            np.testing.assert_array_equal(np.array(one), np.array(other))
        kernel = target.get_layer("up").kernel
        self.assert_parts(kernel, np.array(kernel), 3)

    def test_the_checkpoint_of_another_model_leaves_it_as_it_is(self):
        _, source = on_mesh(1, 2, units=12)
        prefix = os.path.join(self.create_tempdir(), "c")
        path = tf.train.Checkpoint(kernel=source.get_layer("up").kernel).save(
            prefix
        )
        _, target = on_mesh(1, 2)
        kernel = target.get_layer("up").kernel
        kernel.assign(KERNEL)
        with self.assertRaisesRegex(ValueError, "not changed"):
            tf.train.Checkpoint(kernel=kernel).restore(path)
        self.assert_parts(kernel, KERNEL, 2)

    def test_an_export_names_the_way_to_do_it(self):
        _, mlp = on_mesh(1, 2)
        path = os.path.join(self.create_tempdir(), "exported")
        with self.assertRaisesRegex(
            ValueError, "cannot be exported.*'(up|down)/.*load_model"
        ):
            mlp.export(path, verbose=False)
        saved = os.path.join(self.create_tempdir(), "m.keras")
        mlp.save(saved)
        plain = keras.models.load_model(saved)
        plain.export(path, verbose=False)
        x = KERNEL.T[:, :12]
        exported = tf.saved_model.load(path)
        self.assertAllClose(
            exported.serve(x),
            mlp.predict(x, verbose=0),
            rtol=1e-5,
        )


if __name__ == "__main__":
    tf.test.main()
