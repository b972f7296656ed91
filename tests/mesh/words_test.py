"""Wrong uses of meshes and strategies: errors say what to do instead."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tfscale

X = np.ones((4, 4), "float32")
LAYOUTS = {"up/kernel": (None, "model"), "down/kernel": ("model", None)}


def distribution():
    mesh = tfscale.device_mesh(model=2)
    layout_map = keras.distribution.LayoutMap(mesh)
    return keras.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="model"
    )


def strategy(data=2, **options):
    return tfscale.MeshStrategy(tfscale.device_mesh(data=data), **options)


def build():
    x = keras.Input((4,))
    y = keras.layers.Dense(8, "relu", name="up")(x)
    return keras.Model(x, keras.layers.Dense(4, name="down")(y))


class ArgumentsTest(parameterized.TestCase):
    @parameterized.parameters(
        (
            lambda: tfscale.device_mesh(data=2.0),
            "Received: data=2.0. Use da.*2",
        ),
        (lambda: tfscale.device_mesh(model="2"), "an integer.*model='2'"),
        (lambda: tfscale.device_mesh(pipeline=True), "pipeline=True"),
        (lambda: tfscale.use_virtual_devices("8"), "num_devices='8'"),
        (
            lambda: tfscale.device_mesh(
                data=2, devices=tf.config.list_logical_devices()[:2]
            ),
            "the `name`s",
        ),
        (
            lambda: strategy(layout_map=distribution()),
            "Received: <ModelParallel.*pass the map that it was made with",
        ),
        (lambda: strategy(layout_map=[".*"]), r"Received: \['\.\*'\]"),
        (lambda: strategy(sequence_parallel="no"), "True or False.*'no'"),
        (lambda: tfscale.auto_layout_map(build, None), "Received: None"),
        (
            lambda: tfscale.sharding_summary(tfscale.device_mesh(model=2)),
            "Received: <DeviceMesh.*that was built",
        ),
    )
    def test_of_the_wrong_type(self, make, text):
        with self.assertRaisesRegex(TypeError, text):
            make()

    @parameterized.parameters(
        (dict(data=33, pipeline=2), "33 x 2 x 1 = 66.*there are 8 CPU"),
        (dict(data=99, speeds=[1] * 99), "99 x 1 x 1 = 99.*there are 8 CPU"),
        (dict(data=99, speeds="measure"), "99 x 1 x 1 = 99.*there are 8 CPU"),
        (dict(data=2, devices=["CPU:0", "CPU:1", "CPU:2"]), "is 2, and.*CPU:2"),
        (dict(data=3, devices=["CPU:0", "CPU:1"]), "that is 3, and.*CPU:1"),
        (dict(data=2, devices=["CPU:0", "CPU:0"]), "that is 2, and.*CPU:0"),
    )
    def test_of_more_or_fewer_devices_than_the_axes_need(self, axes, text):
        with self.assertRaisesRegex(ValueError, text):
            tfscale.device_mesh(**axes)

    def test_zero_stage_is_a_number(self):
        with self.assertRaisesRegex(ValueError, "zero_stage=True"):
            strategy(zero_stage=True)

    def test_a_pipeline_is_of_a_plain_model(self):
        # It said that its steps are its own.
        mesh = tfscale.device_mesh(pipeline=2)
        with tfscale.MeshStrategy(mesh).scope():
            model = tfscale.PipelineModel(build(), 2)
            with self.assertRaisesRegex(ValueError, "only once.*`model`"):
                tfscale.PipelineModel(model, 2)

    def test_sizes_of_numpy_are_integers(self):
        mesh = tfscale.device_mesh(data=np.int64(2))
        self.assertIs(type(mesh.shape[0]), int)


class ByHandTest(parameterized.TestCase):
    def model_and_step(self, mesh_strategy):
        with mesh_strategy.scope():
            model, optimizer = build(), keras.optimizers.SGD()

        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(X))
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)

        return model, step

    def test_a_step_that_the_replicas_do_not_run(self):
        mesh_strategy = strategy()
        _, step = self.model_and_step(mesh_strategy)
        with self.assertRaisesRegex(ValueError, "Received: a call outside"):
            step()
        with (
            self.assertRaisesRegex(ValueError, "(?s)on replicas.*strategy.run"),
            mesh_strategy.scope(),
        ):
            step()
        mesh_strategy.run(step)

    @parameterized.parameters(dict(data=2), dict(pipeline=2))
    def test_a_step_of_a_model_that_the_scope_runs(self, **axes):
        # "DistributedVariable.handle is not available", and for a pipeline
        # that None has no quotient by a number.
        with tfscale.MeshStrategy(tfscale.device_mesh(**axes)).scope():
            model = build()
            if "pipeline" in axes:
                model = tfscale.PipelineModel(model, 2)
            model.compile("sgd", "mse")
            model.test_on_batch(X, X)
            with self.assertRaisesRegex(ValueError, "replica context.*run"):
                model.train_step((X, X))

    def test_a_scope_in_that_of_another_strategy(self):
        with (
            self.assertRaisesRegex(ValueError, "must not be nested"),
            strategy().scope(),
            strategy().scope(),
        ):
            pass
        one = strategy()
        with one.scope(), one.scope():
            pass

    def test_a_model_made_outside_of_the_scope_that_it_trains_in(self):
        # Replicas that all wrote to one weight had other shapes to exchange.
        model = build()
        with strategy().scope():
            model.compile("sgd", "mse")
            with self.assertRaisesRegex(
                ValueError, "'up/kernel', created outside"
            ):
                model.fit(X, X, verbose=0)

    @parameterized.parameters(False, True)
    @pytest.mark.crossing(every=2)
    def test_low_rank_adaptation_outside_of_the_scope(self, has_optimizer):
        # It was an AssertionError of TensorFlow, without a word; with an
        # optimizer of the scope, weights that all replicas updated at once.
        mesh_strategy = strategy()
        with mesh_strategy.scope():
            model = build()
            optimizer = keras.optimizers.SGD() if has_optimizer else None
        model.get_layer("up").enable_lora(2)
        optimizer = optimizer or keras.optimizers.SGD()
        with mesh_strategy.scope():  # Metrics outside are another error.
            model.compile(optimizer, "mse")
        with self.assertRaisesRegex(
            ValueError, "'up/lora_kernel_a.*`enable_lo"
        ):
            model.fit(X, X, verbose=0)

    @parameterized.parameters("map", "jacobian")
    def test_model_ranks_that_would_meet_in_an_iteration(self, kind):
        # The sum of the iteration that TensorFlow traces stood for all.
        mesh_strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(model=2), LAYOUTS
        )
        model, _ = self.model_and_step(mesh_strategy)

        def step():
            x = tf.constant(X)
            if kind == "map":
                return tf.vectorized_map(lambda row: model(row[None]), x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = model(x)
            return tape.batch_jacobian(y, x)

        run = tf.function(lambda: mesh_strategy.run(step), autograph=False)
        with self.assertRaisesRegex(
            RuntimeError, "cannot exchange tensors inside one iteration of"
        ):
            run()

    def test_model_ranks_gather_in_a_branch(self):
        mesh_strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(model=2), LAYOUTS
        )
        model, _ = self.model_and_step(mesh_strategy)

        def branch():
            return tf.cond(
                tf.constant(X)[0, 0] < np.inf, lambda: model(X), lambda: 0 * X
            )

        def outside():
            return model(X)

        found, expected = (
            tf.function(
                functools.partial(mesh_strategy.run, fn), autograph=False
            )()
            for fn in (branch, outside)
        )
        np.testing.assert_allclose(found, expected, rtol=1e-5)


class Accumulates(keras.Model):
    """Updates every other batch, by a branch, a loop or a function."""

    def __init__(self, *args, way="branch", sums_first=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.way, self.sums_first = way, sums_first
        self.count = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )
        self.sums = [
            self.add_weight(shape=v.shape, initializer="zeros", trainable=False)
            for v in self.trainable_variables
        ]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        grads = tape.gradient(loss, variables)
        if self.sums_first:
            grads = tfscale.sum_gradients(grads, variables)
        for total, gradient in zip(self.sums, grads):
            total.assign(total + gradient)

        def update():
            sums = [tf.convert_to_tensor(total) for total in self.sums]
            self.optimizer.apply(sums, variables)
            return tf.constant(1)

        if self.way == "branch":
            is_due = tf.equal(self.count % 2, 1)
            tf.cond(is_due, update, lambda: tf.constant(0))
        elif self.way == "loop":
            tf.while_loop(lambda i: i < 1, lambda i: update() + i, [0])
        else:
            tf.function(update, autograph=False)()
        self.count.assign_add(1)
        return {"loss": loss}


class AccumulatesTest(parameterized.TestCase):
    @parameterized.product(
        way=("branch", "loop", "function"), zero_stage=(0, 1, 3)
    )
    @pytest.mark.crossing(every=9)
    def test_on_replicas_it_is_refused(self, way, zero_stage):
        # "merge_call called while defining a new graph or a tf.function."
        x = np.ones((8, 64), "float32")
        with strategy(zero_stage=zero_stage).scope():
            inputs = keras.Input((64,))
            hidden = keras.layers.Dense(128, name="up")(inputs)
            outputs = keras.layers.Dense(64, name="down")(hidden)
            model = Accumulates(
                inputs, outputs, way=way, sums_first=zero_stage == 3
            )
            model.compile("sgd", "mse")
        before = model.get_weights()
        with self.assertRaisesRegex(
            ValueError,
            "(?s)in a branch, a loop.*`gradient_accumulation_steps`.*"
            "`tfscale.callbacks.GradientAccumulation`",
        ):
            model.fit(x, x, verbose=0)
        for a, b in zip(before, model.get_weights()):
            np.testing.assert_array_equal(a, b)

    def test_with_the_callback_it_is_refused(self):
        inputs = keras.Input((4,))
        model = Accumulates(inputs, keras.layers.Dense(4)(inputs))
        model.compile("sgd", "mse")
        callback = tfscale.callbacks.GradientAccumulation(2)
        with self.assertRaisesRegex(
            ValueError, "Received: a call inside of a .*branch.*one update"
        ):
            model.fit(X, X, verbose=0, callbacks=[callback])


def _mean(y, predicted):
    return keras.ops.mean((y - predicted) ** 2)


class WarningsTest(parameterized.TestCase):
    @parameterized.parameters(
        dict(data=2), dict(data=4), dict(data=2, pipeline=2)
    )
    @pytest.mark.crossing(every=2)
    def test_they_come_once_and_not_once_a_replica(self, **axes):
        with tfscale.MeshStrategy(tfscale.device_mesh(**axes)).scope():
            model = build()
            if "pipeline" in axes:
                model = tfscale.PipelineModel(model, 2)
            model.compile("sgd", _mean)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model.fit(X, X, batch_size=4, epochs=2, verbose=0)
        texts = [str(one.message) for one in found]
        self.assertLen(texts, 1)
        self.assertIn("the loss '_mean'", texts[0])

    @parameterized.parameters(2, 4)
    @pytest.mark.crossing(every=2)
    def test_those_of_a_layer_are_shown_once(self, data):
        """By Python, to which replicas of equal rows give the same one."""
        with strategy(data).scope():
            inputs = {name: keras.Input((4,), name=name) for name in "ab"}
            outputs = keras.layers.Add()(list(inputs.values()))
            model = keras.Model(inputs, outputs)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("default")
            model.predict([X, X], batch_size=4, verbose=0)
        self.assertLen(found, 1)
        self.assertIn("structure of `inputs`", str(found[0].message))


if __name__ == "__main__":
    absltest.main()
