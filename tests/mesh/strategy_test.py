"""Replicas are the data axis: in loops by hand, in `fit`, for lookups too."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers

RANDOM = np.random.RandomState(0)
# Few rows of the table, so each occurs often in a batch.
TOKENS = RANDOM.randint(0, 3, (48, 4))
TARGETS = RANDOM.normal(size=(48, 2)).astype("float32")


def build():
    tokens = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(3, 5)(tokens)
    x = keras.layers.Dense(4, "tanh", name="a")(keras.layers.Flatten()(x))
    return keras.Model(tokens, keras.layers.Dense(2, name="b")(x))


def strategy(**axes):
    return tfscale.MeshStrategy(tfscale.device_mesh(**axes))


def fit(make_optimizer, data=None):
    """Variables and slots of a plain model after three steps of `fit`."""

    def train():
        model, optimizer = build(), make_optimizer()
        model.compile(optimizer, "mse", run_eagerly=data is None)
        model.fit(TOKENS, TARGETS, batch_size=16, shuffle=False, verbose=0)
        return [np.array(v) for v in model.variables + optimizer.variables]

    if data is None:
        return train()
    with strategy(data=data).scope():
        return train()


def dense_adam(*args, **kwargs):
    """Adam that adds up the rows of a lookup first."""
    return same_numbers.with_dense_gradients(
        keras.optimizers.Adam(*args, **kwargs)
    )


class LookupsTest(parameterized.TestCase):
    """Gradients of rows that a batch looks up more than once."""

    @parameterized.named_parameters(
        ("one_replica", 1, {}),
        ("two_replicas", 2, {}),
        ("clipped", 1, {"global_clipnorm": 0.01}),
    )
    @pytest.mark.crossing(every=3)
    def test_are_added_up_where_plain_keras_takes_each_by_itself(
        self, data, options
    ):
        outcomes = []
        for kind, replicas in (
            (dense_adam, None),
            (keras.optimizers.Adam, None),
            (keras.optimizers.Adam, data),
        ):
            same_numbers.reset()
            make = functools.partial(kind, 0.01, **options)
            outcomes.append(fit(make, replicas))
        right, keras_alone, here = outcomes
        for expected, actual in zip(right, here, strict=True):
            same_numbers.assert_close(actual, expected)
        # The table is the first variable. The day this fails, Keras is right
        # and `dense_gradient` can go.
        self.assertGreater(np.abs(keras_alone[0] - right[0]).max(), 1e-4)

    @parameterized.named_parameters(
        ("strategy", lambda: strategy(data=1).scope(), tf.Tensor),
        ("no_strategy", contextlib.nullcontext, tf.IndexedSlices),
    )
    @pytest.mark.crossing(every=2)
    def test_are_dense_under_the_strategy(self, scope, kind):
        kinds = []

        @tf.function(autograph=False)
        def gradient():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(TOKENS))
            found = tape.gradient(loss, model.trainable_variables[0])
            kinds.append(type(found))
            return tf.convert_to_tensor(found)

        with scope():
            model = build()
            tf.distribute.get_strategy().run(gradient)
        self.assertTrue(issubclass(kinds[0], kind))


class LoopByHandTest(parameterized.TestCase):
    @parameterized.parameters(1, 2, 4)
    @pytest.mark.crossing(every=3)
    def test_run_and_reduce_have_the_numbers_of_one_device(self, data):
        same_numbers.reset()
        one = build()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        losses = []
        for start in range(0, 48, 16):
            x, y = TOKENS[start : start + 16], TARGETS[start : start + 16]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(one(x) - y))
            gradients = tape.gradient(loss, one.trainable_variables)
            optimizer.apply(gradients, one.trainable_variables)
            losses.append(loss)

        same_numbers.reset()
        mesh = strategy(data=data)
        with mesh.scope():
            model = build()
            replicated = keras.optimizers.SGD(0.1, momentum=0.9)
            replicated.build(model.trainable_variables)
        batches = mesh.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices((TOKENS, TARGETS)).batch(16)
        )

        def step(x, y):
            with tf.GradientTape() as tape:
                squares = tf.square(model(x) - y)
                # Of the global batch, as tf.distribute wants it.
                loss = tf.reduce_sum(squares) / (16 * 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            replicated.apply(gradients, model.trainable_variables)
            return loss

        @tf.function
        def train(x, y):
            per_replica = mesh.run(step, args=(x, y))
            return mesh.reduce("SUM", per_replica, axis=None)

        found = [train(x, y) for x, y in batches]
        same_numbers.assert_close(found, losses)
        for expected, actual in zip(
            one.variables + optimizer.variables,
            model.variables + replicated.variables,
            strict=True,
        ):
            same_numbers.assert_close(actual, expected, expected.path)
            components = mesh.experimental_local_results(actual.value)
            for component in components[1:]:
                np.testing.assert_array_equal(component, components[0])

    @parameterized.parameters(
        lambda mesh, data: mesh.experimental_distribute_dataset(data),
        lambda mesh, data: mesh.distribute_datasets_from_function(
            lambda context: data
        ),
    )
    def test_one_replica_on_cpus_has_an_ordinary_iterator(self, distribute):
        # Another one would slow down the memory of the whole process.
        data = tf.data.Dataset.range(10).batch(4)
        mesh = strategy(pipeline=2)
        batches = iter(distribute(mesh, data))
        (on_host,) = batches._iterators
        self.assertIs(type(on_host._iterator), type(iter(data)))
        found = [mesh.experimental_local_results(batch) for batch in batches]
        self.assertEqual([len(parts) for parts in found], [1, 1, 1])
        for (actual,), expected in zip(found, data, strict=True):
            np.testing.assert_array_equal(actual, expected)

    @parameterized.parameters(
        (10, 5), (9, 5), (None, tf.data.INFINITE_CARDINALITY)
    )
    def test_a_step_takes_a_batch_for_each_replica(self, batches, steps):
        # Keras took batches for steps, and warned that data ran out.
        mesh = strategy(data=2)
        data = tf.data.Dataset.range(10).repeat().take(batches or -1)
        found = mesh.distribute_datasets_from_function(lambda context: data)
        self.assertEqual(found.cardinality, steps)

    def test_replicas_reduce_gather_and_know_who_they_are(self):
        mesh = strategy(data=2, pipeline=2)
        self.assertEqual(mesh.num_replicas_in_sync, 2)

        @tf.function
        def run():
            def replica():
                context = tf.distribute.get_replica_context()
                number = tf.cast(context.replica_id_in_sync_group, tf.float32)
                return (
                    number,
                    context.all_reduce("SUM", number + 1.0),
                    context.all_reduce("MEAN", [number, 2.0 * number]),
                    context.all_gather(tf.reshape(number, [1]), axis=0),
                )

            return mesh.run(replica)

        number, total, mean, gathered = map(
            lambda x: tf.nest.map_structure(mesh.experimental_local_results, x),
            run(),
        )
        self.assertEqual([float(x) for x in number], [0.0, 1.0])
        self.assertEqual([float(x) for x in total], [3.0, 3.0])
        self.assertEqual([float(x) for x in mean[1]], [1.0, 1.0])
        np.testing.assert_array_equal(gathered, [[0.0, 1.0], [0.0, 1.0]])

    def test_scalars_are_numbers_of_python(self):
        # `float(model.optimizer.learning_rate)` was an error of TensorFlow.
        with strategy(data=2).scope():
            optimizer = keras.optimizers.SGD(0.5)
            metric = keras.metrics.Sum()
        self.assertEqual(float(optimizer.learning_rate), 0.5)
        self.assertEqual(int(optimizer.iterations), 0)
        self.assertEqual(float(metric.total), 0.0)

    def test_a_count_is_assigned_whole(self):
        # Each of two replicas had a half, cut off: the sum of 3 was 2.
        with strategy(data=2).scope():
            metric = keras.metrics.Metric()
            count = metric.add_variable((), "zeros", dtype="int32")
        count.assign(3)
        self.assertEqual(int(count), 3)
        count.assign_add(2)
        self.assertEqual(int(count), 5)

    @parameterized.parameters({"data": 2}, {"data": 2, "model": 2})
    def test_a_sum_begins_with_its_initial_value(self, **axes):
        # Each replica had it: the sum of two was 14.
        with strategy(**axes).scope():
            metric = keras.metrics.Metric()
            total = metric.add_variable((), keras.initializers.Constant(7))
        self.assertEqual(float(total), 7.0)
        total.assign_add(2)
        self.assertEqual(float(total), 9.0)

    def test_variables_of_one_row_of_stages_are_made_on_the_host(self):
        mesh = tfscale.MeshStrategy(
            tfscale.device_mesh(
                data=2,
                pipeline=2,
                devices=[f"CPU:{i}" for i in (1, 2, 3, 4)],
            )
        )
        with mesh.scope():
            variable = tf.Variable([1.0, 2.0])
        components = mesh.experimental_local_results(variable)
        self.assertEqual([c.device[-5:] for c in components], ["CPU:0"] * 2)
        with mesh.scope(), mesh.extended.variable_creator.placed_on(1):
            variable = tf.Variable([1.0, 2.0])
            slot = tf.Variable([0.0, 0.0])
        components = mesh.experimental_local_results(variable)
        self.assertEqual(
            [c.device[-5:] for c in components], ["CPU:2", "CPU:4"]
        )
        with mesh.scope(), mesh.extended.colocate_vars_with(variable):
            slot = tf.Variable([0.0, 0.0])
        self.assertEqual(
            [c.device for c in mesh.experimental_local_results(slot)],
            [c.device for c in components],
        )


class FitTest(parameterized.TestCase):
    @parameterized.parameters(2, 1)
    @pytest.mark.crossing(every=2)
    def test_plain_models_have_the_numbers_of_one_device(self, data):
        same_numbers.reset()
        expected = fit(lambda: dense_adam(0.01))
        same_numbers.reset()
        actual = fit(lambda: keras.optimizers.Adam(0.01), data)
        for x, y in zip(actual, expected, strict=True):
            same_numbers.assert_close(x, y)

    def test_batches_need_no_common_shape_or_mean(self):
        # Keras takes the mean over replicas of the first batch, to learn what
        # it looks like: of 3 and 2 rows here, and of bools.
        with strategy(data=2).scope():
            inputs = keras.Input((2,), dtype="bool")
            x = keras.layers.Dense(1)(keras.ops.cast(inputs, "float32"))
            model = keras.Model(inputs, x)
            model.compile("sgd", "mse")
        history = model.fit(
            np.ones((5, 2), bool), np.ones((5, 1)), batch_size=5, verbose=0
        )
        self.assertLen(history.history["loss"], 1)


class WrongMeshTest(parameterized.TestCase):
    def refuse(self, error, mesh, *texts):
        with self.assertRaises(error) as caught:
            tfscale.MeshStrategy(mesh)
        for text in texts:
            self.assertIn(text, str(caught.exception))

    def mesh(self, axes, devices):
        return keras.distribution.DeviceMesh(
            shape=tuple(axes.values()),
            axis_names=tuple(axes),
            devices=np.array(devices),
        )

    def test_no_mesh(self):
        self.refuse(
            TypeError,
            ["CPU:0"],
            "must be a `keras.distribution.DeviceMesh`",
            "['CPU:0']",
            "tfscale.device_mesh(data=..., pipeline=...)",
        )

    def test_axis_of_unknown_name(self):
        self.refuse(
            ValueError,
            self.mesh({"data": 1, "batch": 2}, ["CPU:0", "CPU:1"]),
            "must be among 'data', 'pipeline', 'model'",
            "['data', 'batch']",
            "Rename 'batch'",
        )

    @parameterized.parameters(
        (None, "None"),
        ({}, "{}"),
        # Each rank would train all of it, in silence.
        ({".*kernel": (None, None)}, "{'.*kernel': .None, None.}"),
    )
    def test_model_axis_over_which_nothing_is_divided(self, layouts, named):
        mesh = tfscale.device_mesh(model=2)
        with tfscale.MeshStrategy(mesh, layouts).scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
            model.compile("sgd", "mse")
        with self.assertRaisesRegex(
            ValueError, f"'model' axis.*size 2, layout_map={named}.*auto_layout"
        ):
            model.fit(np.ones((4, 2)), np.ones((4, 2)), verbose=0)

    def test_device_that_is_not_there(self):
        self.refuse(
            ValueError,
            self.mesh({"data": 2}, ["CPU:0", "CPU:99"]),
            "must be logical devices of TensorFlow",
            "CPU:99, but there are",
            "use_virtual_devices",
        )

    def test_device_named_twice(self):
        self.refuse(
            ValueError,
            self.mesh({"data": 2}, ["CPU:1", "/device:CPU:1"]),
            "must name each device once",
            "CPU:1 2 times",
        )

    def test_what_is_made_outside_of_the_scope(self):
        # TensorFlow says which strategy is not which.
        def fit(model):
            model.fit(TOKENS, TARGETS, verbose=0)

        def compiled(model):
            model.compile("adam", "mse")
            fit(model)

        def adapted(model):
            model.get_layer("a").enable_lora(2)
            with model.distribute_strategy.scope():
                compiled(model)

        def by_hand(model):
            optimizer = keras.optimizers.Adam()

            def step():
                gradients = [tf.zeros(v.shape) for v in variables]
                optimizer.apply(gradients, variables)

            variables = model.trainable_variables
            model.distribute_strategy.run(step)

        for do, received in (
            (compiled, "a model and an optimizer"),
            (by_hand, "a model and an optimizer"),
            (adapted, "'a/lora_kernel_a:0', made outside"),
        ):
            with strategy(data=2).scope():
                model = build()
            with self.assertRaisesRegex(
                ValueError,
                f"created in its scope. Received: {received}.*strategy.scope",
            ):
                do(model)

    def test_axes_may_be_missing_and_in_any_order(self):
        mesh = self.mesh(
            {"pipeline": 2, "data": 2}, ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
        )
        rows = tfscale.MeshStrategy(mesh).device_rows
        self.assertEqual(
            [[device[-5:] for device in row] for row in rows],
            [["CPU:0", "CPU:2"], ["CPU:1", "CPU:3"]],
        )
        mesh = self.mesh({"data": 2}, ["CPU:0", "CPU:1"])
        self.assertLen(tfscale.MeshStrategy(mesh).device_rows, 2)
