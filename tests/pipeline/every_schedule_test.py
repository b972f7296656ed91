"""Every schedule that has a name gives the numbers of one device."""

import functools
import re

import keras
import numpy as np
import pytest
from absl.testing import parameterized

import tfscale
from tests import crossings
from tests import same_numbers
from tfscale.schedules.named_schedules import SCHEDULES

# Rows of an epoch in batches of 16: the last batch has less than a row for each
# microbatch.
ROWS = 36


def build():
    """Dense and frozen layers, and a skip over several stages."""
    x = skip = inputs = keras.Input((6,))
    for _ in range(8):
        x = keras.layers.Dense(6, "tanh")(x)
        x = keras.layers.BatchNormalization(trainable=False)(x)
    x = keras.layers.Add()([x, skip])
    return keras.Model(inputs, keras.layers.Dense(3)(x))


@functools.cache
def job():
    random = np.random.RandomState(0)
    return same_numbers.Job(
        build,
        dict(
            x=random.normal(size=(ROWS, 6)).astype("float32"),
            y=random.normal(size=(ROWS, 3)).astype("float32"),
            batch_size=16,
        ),
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    )


@functools.cache
def one_device():
    return same_numbers.on_one_device(job())


class SameNumbersTest(parameterized.TestCase):
    @parameterized.parameters(
        *crossings.pairs(
            schedule=(*SCHEDULES, "auto"),
            devices=(2, 4),
            recompute=(False, True),
        )
    )
    @pytest.mark.crossing(every=30)
    def test_three_steps(self, schedule, devices, recompute):
        many = same_numbers.on_mesh(
            job(), devices, 8, schedule=schedule, recompute=recompute
        )
        same_numbers.assert_same(self, one_device(), many)

    @parameterized.parameters(("interleaved", 3), ("zb1p", 3), ("auto", 2))
    @pytest.mark.crossing
    def test_several_stages_on_a_device(self, schedule, stages_per_device):
        many = same_numbers.on_mesh(
            job(), 2, 4, schedule=schedule, stages_per_device=stages_per_device
        )
        same_numbers.assert_same(self, one_device(), many)

    def test_weights_read_a_gradient_that_leaves_their_stage(self):
        def build():
            inputs = keras.Input((6,))
            skip = keras.layers.Dense(6)(inputs)
            x = keras.layers.Dense(6, "tanh")(skip)
            # The gradient by its bias is that by `skip`.
            x = keras.layers.Dense(6, name="last")(x)
            return keras.Model(inputs, keras.layers.Add()([skip, x]))

        x, y = (
            np.random.RandomState(0).normal(size=(2, 16, 6)).astype("float32")
        )
        small = same_numbers.Job(build, dict(x=x, y=y, batch_size=16))
        many = same_numbers.on_mesh(
            small, 2, 4, schedule="zb_h1", balance=["last"]
        )
        same_numbers.assert_same(self, same_numbers.on_one_device(small), many)


class PipelineModelTest(parameterized.TestCase):
    def wrap(self, build=build, num_devices=2, **options):
        same_numbers.reset()
        mesh = tfscale.device_mesh(pipeline=num_devices)
        with tfscale.MeshStrategy(mesh).scope():
            return tfscale.PipelineModel(build(), 4, **options)

    def test_stages_go_round_the_devices(self):
        model = self.wrap(schedule="interleaved", stages_per_device=3)
        self.assertEqual(model.plan.schedule.stage_devices, (0, 1) * 3)
        self.assertLen(model.plan.stages, 6)

    @parameterized.parameters(0, True, 1.5)
    def test_stages_per_device_is_a_positive_integer(self, number):
        with self.assertRaisesRegex(
            (TypeError, ValueError), f"stages_per_device.*{number}"
        ):
            self.wrap(schedule="interleaved", stages_per_device=number)

    def test_auto_says_what_it_took(self):
        model = self.wrap(schedule="auto")
        lines = []
        model.pipeline_summary(print_fn=lines.append)
        self.assertIn("auto: zb_h1", "\n".join(lines))

    def test_auto_goes_by_times_where_stages_do(self):
        plan = self.wrap(schedule="auto", balance="time").plan
        self.assertStartsWith(plan.schedule.name, "auto: ")
        for call, forward, backward, weight in zip(
            plan.graph.calls, *plan.call_costs, strict=True
        ):
            # Seconds of a small layer, and not FLOPs.
            self.assertBetween(forward, 1e-9, 0.5)
            is_trained = any(v.trainable for v in call.variables)
            self.assertEqual(weight > 0, is_trained)
            self.assertGreaterEqual(backward, weight)

    def test_auto_takes_what_the_memory_has_room_for(self):
        # ZB-H1 holds more on the second device than 1F1B does there.
        with self.assertRaisesRegex(ValueError, "needs least") as caught:
            self.wrap(schedule="auto", memory_limit=1)
        least = re.search(r"needs ([\d,]+) bytes", str(caught.exception))[1]
        least = int(least.replace(",", ""))
        tight = self.wrap(schedule="auto", memory_limit=least)
        self.assertEqual(tight.plan.schedule.name, "auto: 1f1b")
        roomy = self.wrap(schedule="auto", memory_limit=2 * least)
        self.assertEqual(roomy.plan.schedule.name, "auto: zb_h1")


def half_frozen():
    model = keras.Sequential(
        [keras.Input((6,)), *(keras.layers.Dense(6) for _ in range(8))]
    )
    for layer in model.layers[:4]:
        layer.trainable = False
    return model


class FrozenLayersTest(parameterized.TestCase):
    """A frozen layer costs its forward alone if nothing is trained before."""

    def plan(self, build):
        same_numbers.reset()
        mesh = tfscale.device_mesh(pipeline=2)
        with tfscale.MeshStrategy(mesh).scope():
            return tfscale.PipelineModel(build(), 8).plan

    def test_the_cut_of_a_model_whose_first_half_is_frozen(self):
        # 4 x 1 + 4 x 3: 6 layers, 4 of them frozen, against 2 or 5 against 3.
        plan = self.plan(half_frozen)
        sizes = [len(stage.calls) for stage in plan.stages]
        self.assertIn(sizes, ([5, 3], [6, 2]))
        forward, backward, weight = plan.stage_costs
        layer = sum(forward) / 8
        self.assertEqual(sum(backward), 8 * layer)
        self.assertEqual(sum(weight), 4 * layer)

    def test_what_only_passes_gradients_has_no_weight_gradient(self):
        def build():
            model = half_frozen()
            model.layers[0].trainable = True
            return model

        forward, backward, weight = self.plan(build).stage_costs
        layer = sum(forward) / 8
        # The first and the last four train, three pass gradients on.
        self.assertEqual(sum(backward), 13 * layer)
        self.assertEqual(sum(weight), 5 * layer)
