"""Layers are frozen at the epochs, and with the numbers, of one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tfscale.callbacks import BackupAndRestore
from tfscale.callbacks import GradientAccumulation
from tfscale.callbacks import GradientNoiseScale
from tfscale.callbacks import LayerFreezing
from tfscale.pipeline.stages.plan import make_plan
from tfscale.schedules.named_schedules import one_f_one_b

RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(32, 8)).astype("float32")
Y = (X @ RANDOM.normal(size=(8, 4)) / 4).astype("float32")
EPOCHS = 5


def build(num_layers=5):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(8, "tanh", name=f"d{i}") for i in range(num_layers)
    ]
    return keras.Sequential(
        [keras.Input((8,)), *layers, keras.layers.Dense(4, name="head")]
    )


def fit(model, *callbacks, epochs=EPOCHS, **options):
    return model.fit(
        X,
        Y,
        batch_size=16,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        **options,
    ).history


def weights(model):
    return [
        keras.ops.convert_to_numpy(v)
        for v in [*model.weights, *model.optimizer.variables]
    ]


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.5)


def on_one_device(optimizer=None, freezing=None):
    model = build()
    model.compile(optimizer or sgd(), "mse", run_eagerly=True)
    return model, fit(model, freezing or LayerFreezing(0.9, 0.4))


def mesh(layout=False, zero_stage=0, **axes):
    layouts = None
    if layout:
        layouts = {
            ".*d0/kernel": (None, "model"),
            ".*d1/kernel": ("model", None),
        }
    return tfscale.MeshStrategy(
        tfscale.device_mesh(**axes), layouts, zero_stage=zero_stage
    )


class LayerFreezingTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (dict(pipeline=2),),
        (dict(data=2),),
        (dict(model=2, layout=True),),
        (dict(data=2, pipeline=2, zero_stage=1),),
    )
    @pytest.mark.crossing(every=4)
    def test_as_on_one_device(self, axes):
        one, expected = on_one_device()
        # Some, and not all at once.
        self.assertEqual(expected["frozen_layers"], [0, 0, 4, 5, 5])
        strategy = mesh(**axes)
        with strategy.scope():
            model = build()
            if "pipeline" in axes:
                model = tfscale.PipelineModel(model, 2)
            model.compile(sgd(), "mse")
        found = fit(model, LayerFreezing(0.9, 0.4), validation_data=(X, Y))
        self.assertEqual(found["frozen_layers"], [0, 0, 4, 5, 5])
        for a, b in zip(weights(model), weights(one), strict=True):
            same_numbers.assert_close(a, b, rtol=2e-5)

    @pytest.mark.crossing
    def test_under_a_strategy_of_keras(self):
        """Its learning rate is a variable of two devices: a TypeError."""
        _, expected = on_one_device()
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            model = build()
            model.compile(sgd(), "mse")
        found = fit(model, LayerFreezing(0.9, 0.4))
        self.assertEqual(found["frozen_layers"], expected["frozen_layers"])

    def test_a_pipeline_is_cut_anew_with_its_slots(self):
        strategy = mesh(pipeline=2)
        with strategy.scope():
            model = tfscale.PipelineModel(build(), 2)
            model.compile(sgd(), "mse")
        before = model.plan.stages[0].layers
        fit(model, LayerFreezing(1e9, 0.0, ["d0", "d1", "d2"]), epochs=2)
        stages = [stage.layers for stage in model.plan.stages]
        self.assertGreater(len(stages[0]), len(before))
        devices = {
            layer.name: strategy.device_rows[0][number]
            for number, stage in enumerate(model.plan.stages)
            for layer in (call.operation for call in stage.calls)
        }
        for variable in [*model.weights, *model.optimizer.variables[2:]]:
            name = variable.path.split("sequential")[-1].strip("/_")[:2]
            name = "head" if name == "he" else name
            [value] = strategy.experimental_local_results(variable.value)
            self.assertEqual(value.device, devices[name], variable.path)

    def test_frozen_stages_have_no_backward(self):
        # A frozen stage between others computed gradients for nobody.
        with mesh(pipeline=3).scope():
            model = tfscale.PipelineModel(build(), 2, balance=["d2", "d4"])
            model.compile(sgd(), "mse")
        fit(model, LayerFreezing(1e9, 0.0, ["d0", "d1", "d2", "d3"]), epochs=2)
        one = build()
        one.compile(sgd(), "mse", run_eagerly=True)
        freezing = LayerFreezing(1e9, 0.0, ["d0", "d1", "d2", "d3"])
        fit(one, freezing, epochs=2)
        for a, b in zip(weights(model), weights(one), strict=True):
            same_numbers.assert_close(a, b)
        [program] = [p for p in model.programs if len(p.stages) == 3]
        products = [
            sum(
                op.type == "MatMul"
                for phase in stage.joint[0].values()
                for op in phase.function.graph.get_operations()
            )
            for stage in program.stages
        ]
        # Forwards, and of the trained layers gradients: not of what is before.
        self.assertEqual(products, [2, 2, 2 + 2 + 1])

    def test_half_of_the_layers_frozen_makes_one_and_a_half(self):
        layers = [keras.layers.Dense(8, use_bias=False) for _ in range(24)]
        model = keras.Sequential([keras.Input((8,)), *layers])

        def loads(**options):
            plan = make_plan(
                model, one_f_one_b(2, 4), options.get("balance", "flops")
            )
            forward, backward, _ = plan.stage_costs
            return [f + b for f, b in zip(forward, backward)]

        for layer in layers[:12]:
            layer.trainable = False
        ours, halves = loads(), loads(balance=[layers[12].name])
        self.assertEqual(max(halves) / max(ours), 1.5)

    def test_frozen_layers_stay_as_they_are(self):
        model = build()
        model.compile("sgd", "mse", run_eagerly=True)
        kernels = []
        noting = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: kernels.append(
                [layer.kernel.numpy() for layer in model.layers]
            )
        )
        history = fit(model, noting, LayerFreezing(1e9, 0.5, ["d0", "d1"]))
        self.assertEqual(history["frozen_layers"], [0, 0, 2, 2, 2])
        moved = [np.any(a != b) for a, b in zip(kernels[2], kernels[4])]
        self.assertEqual(moved, [False, False, True, True, True, True])

    def test_a_smaller_learning_rate_is_no_convergence(self):
        def frozen(schedule):
            _, history = on_one_device(
                keras.optimizers.SGD(schedule), LayerFreezing(0.3, 0.0)
            )
            return history["frozen_layers"]

        decay = keras.optimizers.schedules.ExponentialDecay(1e-3, 2, 0.3)
        self.assertEqual(frozen(decay), [0] * EPOCHS)

    @parameterized.parameters((None,), (dict(pipeline=2),))
    @pytest.mark.crossing
    def test_it_goes_on_after_an_interruption(self, axes):
        class Interrupt(keras.callbacks.Callback):
            left = 8

            def on_train_batch_begin(self, batch, logs=None):
                Interrupt.left -= 1
                if not Interrupt.left:
                    raise KeyboardInterrupt

        folder = self.create_tempdir().full_path
        strategy = mesh(**axes) if axes else tf.distribute.get_strategy()

        def run(*callbacks):
            with strategy.scope():
                model = build()
                if axes:
                    model = tfscale.PipelineModel(model, 2)
                model.compile(sgd(), "mse", run_eagerly=not axes)
            freezing = LayerFreezing(0.9, 0.4)
            return model, fit(model, *callbacks, freezing, Interrupt())

        def resumable():
            return run(BackupAndRestore(folder, save_freq=1))

        with self.assertRaises(KeyboardInterrupt):
            resumable()
        model, found = resumable()
        one, expected = run()
        self.assertEqual(found["frozen_layers"], [0, 0, 4, 5, 5])
        self.assertEqual(found["frozen_layers"], expected["frozen_layers"])
        for a, b in zip(weights(model), weights(one), strict=True):
            self.assertAllEqual(a, b)

    def test_weights_that_are_no_number_have_not_converged(self):
        model = build()
        model.compile(keras.optimizers.SGD(1e30), "mse", run_eagerly=True)
        history = fit(model, LayerFreezing(0.9, 0.0))
        self.assertTrue(np.isnan(history["loss"][-1]))
        self.assertEqual(history["frozen_layers"][-1], 0)

    @pytest.mark.crossing
    def test_with_accumulation(self):
        one, expected = on_one_device()
        model = build()
        model.compile(sgd(), "mse")
        found = fit(model, GradientAccumulation(2), LayerFreezing(0.9, 0.4))
        self.assertEqual(found["frozen_layers"], expected["frozen_layers"])
        for a, b in zip(weights(model), weights(one), strict=True):
            same_numbers.assert_close(a, b)

    def test_a_second_fit_goes_on(self):
        model = build()
        model.compile("sgd", "mse", run_eagerly=True)
        freezing = LayerFreezing(1e9, 0.0, ["d0", "d1"])
        fit(model, freezing, epochs=1)
        self.assertEqual(fit(model, freezing, epochs=1)["frozen_layers"], [2])
        self.assertEqual([x.trainable for x in model.layers[:3]], [0, 0, 1])

    def test_layers_that_the_user_has_thawed_may_be_frozen_again(self):
        # They counted as frozen, and were trained to the end.
        model = build()
        model.compile("sgd", "mse", run_eagerly=True)
        freezing = LayerFreezing(1e9, 0.5, ["d0", "d1"])
        fit(model, freezing, epochs=1)
        model.get_layer("d1").trainable = True
        model.compile("sgd", "mse", run_eagerly=True)
        history = fit(model, freezing, epochs=4)
        self.assertEqual(history["frozen_layers"], [1, 2, 2, 2])
        self.assertFalse(model.get_layer("d1").trainable)
        model.get_layer("d0").trainable = True
        model.get_layer("d1").trainable = True
        model.compile("sgd", "mse", run_eagerly=True)
        history = fit(model, freezing, epochs=4)
        self.assertEqual(history["frozen_layers"], [0, 2, 2, 2])

    @parameterized.parameters(dict(threshold=0), dict(threshold=1, start=2))
    def test_arguments(self, **arguments):
        with self.assertRaisesRegex(ValueError, "`threshold` must be"):
            LayerFreezing(**arguments)

    @parameterized.parameters(
        (["d7"], "Received: 'd7'. "),
        (["d1"], "Received: 'd1'. .*no backward"),
    )
    def test_layers_that_save_no_backward(self, layers, message):
        model = build()
        model.compile("sgd", "mse", run_eagerly=True)
        with self.assertRaisesRegex(ValueError, message):
            fit(model, LayerFreezing(1.0, layers=layers))

    def test_models_without_leading_layers(self):
        model = build(0)
        model.compile("sgd", "mse", run_eagerly=True)
        with self.assertRaisesRegex(ValueError, "leading layer.*: model"):
            fit(model, LayerFreezing(1.0))

    def test_shared_layers(self):
        x = inputs = keras.Input((8,))
        shared = keras.layers.Dense(8, name="shared")
        outputs = keras.layers.Dense(4)(shared(shared(x)))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse", run_eagerly=True)
        with self.assertRaisesRegex(ValueError, "'shared', whose weights"):
            fit(model, LayerFreezing(1.0))

    @parameterized.parameters(
        lambda: keras.optimizers.SGD(0.1, use_ema=True),
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, use_ema=True)
        ),
        lambda: keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
        ),
    )
    def test_optimizers_that_need_all_weights(self, optimizer):
        # When `fit` ended Keras wrote the averages of the first weights, which
        # were frozen, to others.
        model = build()
        model.compile(optimizer(), "mse", run_eagerly=True)
        with self.assertRaisesRegex(ValueError, "needs an optimizer.*use_ema"):
            fit(model, LayerFreezing(1e9, 0.0, ["d0"]))

    def test_beside_the_noise_scale(self):
        model = build()
        model.compile("sgd", "mse", run_eagerly=True)
        with self.assertRaisesRegex(ValueError, ": `GradientNoiseScale` with"):
            fit(
                model,
                GradientAccumulation(2),
                GradientNoiseScale(),
                LayerFreezing(1.0),
            )


if __name__ == "__main__":
    tf.test.main()
