import dataclasses
import functools
import os
from unittest import mock

import keras
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import tfscale
from tfscale.mesh import timing
from tfscale.planner import DEVICES
from tfscale.planner import blocks
from tfscale.planner import measure
from tfscale.planner.cost import Settings

WIDTH = 32


def _mlp(num_layers=4):
    layers = [
        keras.layers.Dense(2 * WIDTH, activation="relu")
        if n % 2 == 0
        else keras.layers.Dense(WIDTH)
        for n in range(num_layers)
    ]
    return keras.Sequential([keras.Input((WIDTH,)), *layers], name="mlp")


def _plans(build_model=_mlp, **options):
    options = dict(num_devices=4, batch_size=16, device="H100") | options
    return tfscale.plan(build_model, **options)


class PlanTest(parameterized.TestCase):
    @parameterized.parameters(
        Settings(data=4, zero_stage=1),
        Settings(data=2, pipeline=2, num_microbatches=4, schedule="zb_h1"),
        Settings(
            pipeline=2,
            model=2,
            num_microbatches=2,
            schedule="zb_v",
            stages_per_device=2,
        ),
        Settings(data=4, num_microbatches=2, recompute=True),
    )
    @pytest.mark.crossing(every=4)
    def test_any_plan_trains_with_the_numbers_of_one_device(self, settings):
        (plan,) = (p for p in _plans() if p.settings == settings)
        x = np.random.default_rng(0).normal(size=(16, WIDTH)).astype("float32")
        y = x[:, ::-1]
        keras.utils.set_random_seed(1)
        plain = _mlp()
        plain.compile("sgd", "mse", run_eagerly=True)
        expected = plain.fit(x, y, batch_size=16, epochs=2, verbose=0)
        keras.utils.set_random_seed(1)
        with plan.strategy().scope():
            model = plan.wrap(_mlp())
            model.compile("sgd", "mse")
        found = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
        np.testing.assert_allclose(
            found.history["loss"], expected.history["loss"], rtol=1e-5
        )

    def test_of_devices_of_unequal_speed(self):
        def seconds(speeds, **settings):
            plans = _plans(
                functools.partial(_mlp, 6),
                num_devices=2,
                batch_size=12,
                speeds=speeds,
                # A step is FLOPs.
                device=tfscale.planner.Device(
                    *("slow", 1e6, 1e6, 1e12, 1e15, 1e15, 1e15), startup=0
                ),
            )
            settings = Settings(speeds=speeds, **settings)
            (plan,) = (p for p in plans if p.settings == settings)
            return plan.seconds["compute"] + plan.seconds["imbalance"]

        for settings in (dict(data=2), dict(pipeline=2)):
            slow, fast = (
                seconds(speeds, **settings) for speeds in (None, (1.0, 2.0))
            )
            # 1/3 of the work in place of 1/2.
            self.assertAlmostEqual(fast / slow, 2 / 3, delta=0.01)

    def test_a_plan_makes_a_mesh_of_its_speeds(self):
        plans = _plans(num_devices=2, speeds=[1, 3])
        for plan in plans:
            self.assertEqual(plan.strategy().mesh.speeds, (1.0, 3.0))
        self.assertEqual(plans.best.settings.model, 1)

    def test_the_table_says_what_and_why(self):
        lines = []
        _plans().table(print_fn=lines.append)
        (text,) = lines
        for part in ("4 x H100", "MFU", "Examples/s", "4 x 1 x 1", "+"):
            self.assertIn(part, text)

    def test_the_table_says_what_was_not_planned(self):
        class Whole(keras.Model):
            def build(self, input_shape):
                self.dense = keras.layers.Dense(4)
                self.dense.build(input_shape)
                self.built = True

            def call(self, x):
                return self.dense(x)

        def build_model():
            model = Whole(name="whole")
            model.build((None, 8))
            return model

        plans = _plans(build_model)
        self.assertEqual({p.settings.pipeline for p in plans}, {1})
        with self.assertRaisesRegex(
            ValueError, "can have 4 replicas. Use batch_size=.*Planned without"
        ):
            _plans(build_model, batch_size=30)
        lines = []
        plans.table(print_fn=lines.append)
        self.assertIn("Note: Planned without stages", lines[0])

    def test_sizes_that_inputs_leave_open_need_a_length(self):
        # 128 tokens stood for any number, without a word.
        layers = keras.layers

        def tokens(length):
            x = inputs = keras.Input((length,), dtype="int32")
            x = layers.Dense(WIDTH)(layers.Embedding(8, WIDTH)(x))
            return keras.Model(inputs, x)

        def images(size):
            x = inputs = keras.Input((size, size, 3))
            return keras.Model(inputs, layers.Conv2D(4, 3)(x))

        class Whole(keras.Model):
            def __init__(self, length):
                super().__init__()
                self.dense = layers.Dense(4)
                self(keras.Input((length, 8)))

            def call(self, x):
                return self.dense(x)

        for kind in (tokens, images, Whole):
            with self.assertRaisesRegex(ValueError, "length=None"):
                _plans(functools.partial(kind, None))
            found, expected = (
                _plans(functools.partial(kind, size), length=length).best
                for size, length in ((None, 48), (48, None))
            )
            self.assertEqual(found.memory, expected.memory)
            self.assertEqual(found.seconds, expected.seconds)
            self.assertEqual(
                found.tokens_per_second, expected.tokens_per_second
            )

    def test_draws_time_against_memory(self):
        path = os.path.join(self.create_tempdir().full_path, "plans.png")
        _plans().save_png(path)
        self.assertGreater(os.path.getsize(path), 10_000)

    @parameterized.parameters(
        ("NVIDIA A100-SXM4-80GB", 80e9),
        ("NVIDIA A100-PCIE-40GB", 40e9),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5e9),
        ("NVIDIA H100 80GB HBM3", 80e9),
        ("NVIDIA H200", 141e9),
    )
    def test_a_gpu_has_the_memory_of_its_name(self, name, memory):
        # An A100 of 40 GB was planned for as one of 80 GB.
        config = measure.tf.config
        with (
            mock.patch.object(
                config, "list_physical_devices", return_value=[0]
            ),
            mock.patch.object(
                config.experimental,
                "get_device_details",
                return_value={"device_name": name},
            ),
        ):
            self.assertEqual(measure._memory("GPU", 1), memory)

    @mock.patch.dict(timing.WIDTHS, CPU=256)
    @mock.patch.object(timing, "SECONDS", 0.0)  # the fewest repetitions
    @mock.patch.object(blocks, "_BLOCKS", 1)
    def test_measures_this_machine(self):
        device = _plans(num_devices=2, device="measure").device
        for field in dataclasses.fields(device)[1:]:
            value = getattr(device, field.name)
            self.assertGreaterEqual(value, 0, field.name)
        self.assertGreater(device.float32_flops, 1e8)

    @mock.patch.object(timing, "seconds", lambda *args: 1.0)
    def test_a_chain_may_take_no_longer_than_a_shorter_one(self):
        # On a busy machine it was a ZeroDivisionError.
        device = measure.measure_device(num_devices=2)
        width = timing.WIDTHS["CPU"]
        self.assertEqual(device.float32_flops, 2 * width**3 * timing.MANY)

    @parameterized.parameters(
        (dict(num_devices=0), ValueError, "num_devices=0"),
        (dict(batch_size=2.0), TypeError, "batch_size=2"),
        (dict(length=0), ValueError, "length=0"),
        (dict(device="H10"), ValueError, "Did you mean 'H100'"),
        (dict(speeds=[1, 2]), ValueError, r"speeds=\[1, 2\]. There are 4"),
        (dict(speeds="measure"), TypeError, "speeds='measure'"),
        (dict(device=8), TypeError, "Received: device=8"),
        (
            dict(device=dataclasses.replace(DEVICES["H100"], memory=1e4)),
            ValueError,
            "The smallest plan .* needs .*: weights ",
        ),
    )
    def test_bad_input_is_refused(self, options, error, message):
        with self.assertRaisesRegex(error, message):
            _plans(**options)


if __name__ == "__main__":
    absltest.main()
