"""PipeDream: each batch by the weights that the paper says, bit for bit.

The reference is plain Keras on one device. It computes the gradient of a batch
at weights of several versions, those that `Schedule.version` names for each
stage, and applies it to the newest ones.
"""

import io

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers

RANDOM = np.random.RandomState(0)
ROWS = 8 * 10 + 3
X = RANDOM.normal(size=(ROWS, 8)).astype("float32")
Y = RANDOM.normal(size=(ROWS, 4)).astype("float32")


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def adam():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.8)
    return keras.optimizers.Adam(schedule, clipnorm=0.5)


def build(normalization=(), depth=5):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((8,))]
    for _ in range(depth):
        layers.append(keras.layers.Dense(16, "tanh", kernel_regularizer="l2"))
    return keras.Sequential([*layers, *normalization, keras.layers.Dense(4)])


def build_shallow():
    """Where the number of layers does not matter."""
    return build(depth=2)


def build_with_norm():
    return build([keras.layers.BatchNormalization()])


class Spare(keras.layers.Layer):
    def build(self, _):
        self.spare = self.add_weight(
            shape=(3,), initializer="ones", regularizer="l2"
        )

    def call(self, x):
        return x


def dataset():
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    return data.batch(8)


def wrap(
    optimizer,
    window,
    *,
    schedule="pipedream",
    microbatches=1,
    make=build,
    **axes,
):
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(**axes))
    with strategy.scope():
        model = make()
        model = tfscale.PipelineModel(model, microbatches, schedule)
        model.compile(
            optimizer(), "mse", metrics=["mae"], steps_per_execution=window
        )
    return model


def reference(model, make, optimizer, window):
    """Loss of an epoch, and the model after it, of plain Keras."""
    plain, schedule = make(), model.plan.schedule
    variables = plain.trainable_variables
    numbers = {id(v): i for i, v in enumerate(model.trainable_variables)}
    stage_of = {
        numbers[id(v)]: stage.index
        for stage in model.plan.stages
        for v in stage.trainable
    }
    optimizer.build(variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((plain(x, training=True) - y) ** 2)
            loss += sum(plain.losses)
        return loss, tape.gradient(loss, [v.value for v in variables])

    newest = [v.numpy() for v in variables]
    total = 0.0
    for first in range(0, -(-ROWS // 8), window):
        versions = [newest]
        for batch in range(min(window, -(-ROWS // 8) - first)):
            for number, variable in enumerate(variables):
                version = schedule.version(stage_of[number], batch)
                variable.assign(versions[version][number])
            rows = slice(8 * (first + batch), 8 * (first + batch) + 8)
            loss, gradients = step(X[rows], Y[rows])
            total += float(loss) * len(X[rows])
            for variable, value in zip(variables, newest, strict=True):
                variable.assign(value)
            optimizer.apply(gradients, variables)
            newest = [v.numpy() for v in variables]
            versions.append(newest)
    return total / ROWS, plain


class PipeDreamTest(tf.test.TestCase, parameterized.TestCase):
    @pytest.mark.crossing
    def test_a_single_number_counts_by_the_rows_of_its_own_batch(self):
        def mean_of_targets(y, _):
            return tf.reduce_mean(y)

        strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=2, pipeline=2))
        with strategy.scope():
            model = tfscale.PipelineModel(build_shallow(), 1, "pipedream")
            model.compile(
                "sgd",
                "mse",
                metrics=[mean_of_targets],
                steps_per_execution=2,
            )
        # The last batch has two rows on one replica, and one on the other.
        logs = model.fit(dataset(), verbose=0).history
        means = [Y[first : first + 8].mean() for first in range(0, ROWS, 8)]
        self.assertAllClose(logs["mean_of_targets"], [np.mean(means)])

    @parameterized.parameters(
        (momentum, dict(pipeline=4), 4, {}),
        (adam, dict(pipeline=3), 11, {}),
        (adam, dict(pipeline=3), 4, dict(schedule="pipedream_vertical_sync")),
        # These add up in another order.
        (adam, dict(pipeline=2), 4, dict(microbatches=4)),
        (adam, dict(data=2, pipeline=2), 4, {}),
        (momentum, dict(pipeline=2), 4, dict(make=build_with_norm)),
        (adam, dict(pipeline=4), 4, {}),
        (momentum, dict(pipeline=3), 4, {}),
    )
    @pytest.mark.crossing(every=8)
    def test_the_gradient_of_a_batch_is_of_its_versions(
        self, optimizer, axes, window, options
    ):
        is_exact = window != 4 or "schedule" in options or axes["pipeline"] > 2
        model = wrap(optimizer, window, **axes, **options)
        before = [v.numpy() for v in model.trainable_variables]
        history = model.fit(dataset(), verbose=0).history
        own = optimizer()
        loss, plain = reference(model, options.get("make", build), own, window)
        self.assertAllClose(history["loss"][0], loss, rtol=1e-6)
        self.assertEqual(model.optimizer.iterations, 11)
        for found, expected in zip(
            [*model.trainable_variables, *model.optimizer.variables],
            [*plain.trainable_variables, *own.variables],
            strict=True,
        ):
            if is_exact:
                self.assertAllEqual(found, expected, expected.path)
            else:
                same_numbers.assert_close(
                    np.array(found), np.array(expected), expected.path
                )
        self.assertNotAllClose(before[0], model.trainable_variables[0])
        for found, expected in zip(
            model.non_trainable_variables,
            plain.non_trainable_variables,
            strict=True,
        ):
            same_numbers.assert_close(
                np.array(found), np.array(expected), expected.path
            )
        # Evaluated as any pipeline is.
        plain.compile(loss="mse", metrics=["mae"], run_eagerly=True)
        evaluated = model.evaluate(X, Y, verbose=0, return_dict=True)
        for name, value in plain.evaluate(
            X, Y, verbose=0, return_dict=True
        ).items():
            same_numbers.assert_close(evaluated[name], value, name)

    @parameterized.parameters(2, 3)
    @pytest.mark.crossing
    def test_a_window_of_one_batch_is_one_device(self, num_stages):
        model = wrap(adam, 1, make=build_shallow, pipeline=num_stages)
        model.fit(dataset(), verbose=0)
        plain = build_shallow()
        plain.compile(adam(), "mse", run_eagerly=True)
        plain.fit(dataset(), verbose=0)
        for found, expected in zip(
            [*model.trainable_variables, *model.optimizer.variables],
            [*plain.trainable_variables, *plain.optimizer.variables],
            strict=True,
        ):
            same_numbers.assert_close(
                np.array(found), np.array(expected), expected.path
            )
        logs = model.train_on_batch(X[:8], Y[:8], return_dict=True)
        expected = plain.train_on_batch(X[:8], Y[:8], return_dict=True)
        same_numbers.assert_close(logs["loss"], expected["loss"], "loss")

    @parameterized.parameters(
        # Gradients were divided by the factor, by which no loss was multiplied.
        (
            lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0),
            build_shallow,
        ),
        # A variable that the loss does not depend on was a KeyError.
        (momentum, lambda: build([Spare()], depth=2)),
    )
    @pytest.mark.crossing(every=2)
    def test_a_window_of_one_batch_has_the_weights_of_one_device(
        self, optimizer, make
    ):
        model = wrap(optimizer, 1, make=make, pipeline=2)
        model.fit(dataset(), verbose=0)
        plain = make()
        plain.compile(optimizer(), "mse", run_eagerly=True)
        plain.fit(dataset(), verbose=0)
        for found, expected in zip(model.weights, plain.weights, strict=True):
            same_numbers.assert_close(
                np.array(found), np.array(expected), expected.path
            )

    @parameterized.parameters((2, None), (4, None), (4, (X, Y)))
    @pytest.mark.crossing
    def test_a_kill_within_an_epoch_changes_nothing(self, window, validation):
        folder = self.create_tempdir().full_path

        def run(killed_after=None):
            def kill(batch, logs):
                if batch == killed_after:
                    raise KeyboardInterrupt

            model = wrap(momentum, window, make=build_shallow, pipeline=2)
            history = model.fit(
                dataset(),
                validation_data=validation,
                epochs=2,
                verbose=0,
                callbacks=[
                    tfscale.callbacks.BackupAndRestore(folder, save_freq=4),
                    keras.callbacks.LambdaCallback(on_train_batch_end=kill),
                ],
            )
            return model, history.history

        expected, expected_history = run()
        with self.assertRaises(KeyboardInterrupt):
            run(killed_after=7)
        with self.assertLogs(level="INFO") as logs:
            model, history = run()
        self.assertIn("1 interruptions", "".join(logs.output))
        self.assertEqual(history, expected_history)
        for found, other in zip(model.weights, expected.weights, strict=True):
            self.assertAllEqual(found, other)

    def test_a_loss_that_is_not_finite_updates_nothing(self):
        model = wrap(momentum, 4, make=build_shallow, pipeline=2)
        x = X[:32].copy()
        x[8:16] = np.nan
        data = tf.data.Dataset.from_tensor_slices((x, Y[:32])).batch(8)
        with self.assertRaisesRegex(FloatingPointError, "loss NaN. This batch"):
            model.fit(data, verbose=0)
        for variable in model.trainable_variables:
            self.assertAllInRange(variable, -10.0, 10.0)

    def test_the_summary_says_how_old_weights_are(self):
        model = wrap(adam, 8, pipeline=3)
        text = io.StringIO()
        model.pipeline_summary(print_fn=lambda line: text.write(line + "\n"))
        text = text.getvalue()
        self.assertIn("Schedule: pipedream, 1 microbatches", text)
        self.assertIn("Window: 8 batches (`steps_per_execution`)", text)
        # 8 x 16 + 16 and 16 x 16 + 16 numbers; 2 x (16 x 16 + 16).
        self.assertIn(
            "Weights of stage 0: up to 2 updates old, 3.25 KB of older ones",
            text,
        )
        self.assertIn(
            "Weights of stage 1: up to 1 updates old, 2.12 KB of older ones",
            text,
        )
        self.assertNotIn("Weights of stage 2", text)
        with self.assertRaisesRegex(ValueError, "must change no variable"):
            model.timelines(X[:8], Y[:8])

    @parameterized.parameters(
        (lambda: keras.optimizers.SGD(global_clipnorm=1.0), {}, "global_clip"),
        (lambda: keras.optimizers.SGD(use_ema=True), {}, "with use_ema"),
        (
            lambda: keras.optimizers.LossScaleOptimizer(momentum()),
            {},
            "a LossScaleOptimizer",
        ),
        # Each stage moved the product, or cleared the sums, of all of them.
        (lambda: keras.optimizers.Nadam(0.1), {}, "a Nadam"),
        (
            lambda: keras.optimizers.MultiOptimizer(lambda _: momentum()),
            {},
            "a MultiOptimizer",
        ),
        (
            lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
            {},
            "with gradient_accumulation_steps",
        ),
        (momentum, dict(model=2), "a mesh with a model axis"),
    )
    def test_what_needs_all_stages_is_refused(self, optimizer, axes, text):
        with self.assertRaisesRegex(ValueError, f"Received: .*{text}"):
            wrap(optimizer, 4, pipeline=2, **axes)

    def test_weights_of_two_stages_are_refused(self):
        def tied():
            dense = keras.layers.Dense(8)
            layers = [dense, keras.layers.Dense(8, "relu"), dense]
            return keras.Sequential([keras.Input((8,)), *layers])

        with self.assertRaisesRegex(ValueError, "kernel.* in several stages"):
            wrap(momentum, 4, pipeline=2, make=tied)

    def test_weights_that_neighbors_share_are_in_one_stage(self):
        def tied():
            dense = keras.layers.Dense(8)
            others = [keras.layers.Dense(8, "relu") for _ in range(3)]
            layers = [others[0], dense, dense, *others[1:]]
            return keras.Sequential([keras.Input((8,)), *layers])

        model = wrap(momentum, 4, pipeline=2, make=tied)
        self.assertLen(model.plan.stages[1].trainable, 4)

    def test_versions_that_do_not_fit_are_refused(self):
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
        with strategy.scope():
            model = tfscale.PipelineModel(
                build(), 1, "pipedream", memory_limit=15_000
            )
            model.compile(momentum(), "mse", steps_per_execution=1)
            with self.assertRaisesRegex(ValueError, "of them older weights"):
                model.compile(momentum(), "mse", steps_per_execution=8)


if __name__ == "__main__":
    tf.test.main()
