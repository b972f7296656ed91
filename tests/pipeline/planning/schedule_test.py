"""Schedules against literal tables, and what their validator refuses."""

import itertools
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from tests.pipeline.user_schedules import interleaved
from tests.pipeline.user_schedules import zero_bubble_h1
from tfscale.pipeline.planning.action import Action
from tfscale.pipeline.planning.action import dependencies
from tfscale.pipeline.planning.named_schedules import get_schedule
from tfscale.pipeline.planning.named_schedules import gpipe
from tfscale.pipeline.planning.named_schedules import one_f_one_b
from tfscale.pipeline.planning.schedule import Schedule
from tfscale.pipeline.planning.simulate import simulate

SIZES = tuple(itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 16)))


def table(schedule, **costs):
    """Staircase of a schedule; one column of three characters per unit."""
    costs = {"forward": 1, "backward": 1} | costs
    simulation = simulate(schedule, **costs)
    rows = [
        ["  "] * round(simulation.makespan) for _ in range(schedule.num_devices)
    ]
    looped = schedule.num_stages > schedule.num_devices
    for (kind, stage, microbatch), device, start, end in simulation.spans:
        name = f"{kind}{microbatch}"
        if looped and stage >= schedule.num_devices:
            name = name.lower()  # The second stage of the device.
        for unit in range(round(start), round(end)):
            rows[device][unit] = name
    return [" ".join(row).rstrip() for row in rows]


class GeneratorsTest(parameterized.TestCase):
    def test_gpipe_does_all_forwards_then_all_backwards(self):
        self.assertEqual(
            table(gpipe(3, 4)),
            [
                "F0 F1 F2 F3             B0 B1 B2 B3",
                "   F0 F1 F2 F3       B0 B1 B2 B3",
                "      F0 F1 F2 F3 B0 B1 B2 B3",
            ],
        )

    def test_1f1b_alternates_once_the_pipeline_is_full(self):
        self.assertEqual(
            table(one_f_one_b(3, 4)),
            [
                "F0 F1 F2       B0 F3 B1    B2    B3",
                "   F0 F1    B0 F2 B1 F3 B2    B3",
                "      F0 B0 F1 B1 F2 B2 F3 B3",
            ],
        )

    def test_1f1b_with_fewer_microbatches_than_stages(self):
        self.assertEqual(
            table(one_f_one_b(4, 2)),
            [
                "F0 F1                B0    B1",
                "   F0 F1          B0    B1",
                "      F0 F1    B0    B1",
                "         F0 B0 F1 B1",
            ],
        )

    @parameterized.parameters(*SIZES)
    def test_orders_keep_every_dependency(self, num_stages, num_microbatches):
        for make in (gpipe, one_f_one_b):
            schedule = make(num_stages, num_microbatches)
            done = []
            for action in schedule.order():
                self.assertContainsSubset(
                    dependencies(action, num_stages), done
                )
                done.append(action)
            for device, actions in enumerate(schedule.actions):
                self.assertEqual(
                    [a for a in done if a.stage == device], list(actions)
                )
            self.assertLen(done, 2 * num_stages * num_microbatches)

    @parameterized.parameters((0, 1), (1, 0), (-1, 2))
    def test_sizes_below_one_are_refused(self, *sizes):
        with self.assertRaisesRegex(ValueError, "at least one stage and one"):
            gpipe(*sizes)
        with self.assertRaisesRegex(ValueError, f"num_stages={sizes[0]}"):
            one_f_one_b(*sizes)


class UserSchedulesTest(parameterized.TestCase):
    """Interleaved and zero-bubble schedules are generators, nothing else."""

    def test_interleaved_on_two_devices(self):
        # Small letters: the second stage of a device.
        self.assertEqual(
            table(interleaved(2, 4, 2)),
            [
                "F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1    b2    b3 B2 B3",
                "   F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3",
            ],
        )

    @parameterized.parameters((2, 4, 2), (4, 8, 2), (4, 16, 3), (3, 6, 2))
    def test_interleaving_divides_the_bubble(self, devices, microbatches, v):
        # Bubble to work is (D - 1) / (v M) (Narayanan et al. 2021).
        schedule = interleaved(devices, microbatches, v)
        self.assertEqual(schedule.stage_devices, tuple(range(devices)) * v)
        simulation = simulate(schedule, forward=1.0, backward=2.0)
        self.assertAlmostEqual(
            simulation.makespan / simulation.busy[0] - 1,
            (devices - 1) / (v * microbatches),
        )

    def test_zero_bubble_h1_fills_the_end_with_weight_gradients(self):
        self.assertEqual(
            table(zero_bubble_h1(3, 4), backward=2, weight=1),
            [
                "F0 F1 F2       B0 W0 F3 B1 W1 B2 W2 B3 W3",
                "   F0 F1    B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
                "      F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
            ],
        )

    @parameterized.parameters((2, 4), (3, 6), (4, 8), (8, 16))
    def test_zero_bubble_h1_idles_a_third_of_1f1b(self, stages, microbatches):
        # (S - 1)(F + B - W) with all costs 1, against (S - 1)(F + B + W), and
        # no more than S microbatches in flight (Qi et al. 2023, table 2).
        schedule = zero_bubble_h1(stages, microbatches)
        simulation = simulate(schedule, forward=1, backward=2, weight=1)
        idle = [simulation.makespan - busy for busy in simulation.busy]
        self.assertEqual(idle, [stages - 1] * stages)
        self.assertLessEqual(max(simulation.peak_in_flight), stages)
        self.assertTrue(schedule.has_weight_action(0, 0))
        self.assertFalse(gpipe(2, 2).has_weight_action(0, 0))


class ValidatorTest(parameterized.TestCase):
    def refuse(self, actions, *texts):
        with self.assertRaises(ValueError) as caught:
            Schedule(actions)
        for text in texts:
            self.assertIn(text, str(caught.exception))

    def test_a_missing_action_is_named(self):
        self.refuse(
            [["F0.0", "B0.0"], ["F1.0"]],
            "must have an F and a B for each stage and microbatch",
            "2 stages and 1 microbatches without B1.0",
            "on the device of stage 1",
        )

    def test_a_repeated_action_is_named(self):
        self.refuse(
            [["F0.0", "F0.0", "B0.0"]],
            "F0.0 (device 0, position 1) is there 2 times",
        )

    def test_a_stage_on_two_devices_is_named(self):
        self.refuse(
            [["F0.0", "B0.0", "F1.0"], ["B1.0"]],
            "B1.0 (device 1, position 0) but F1.0 (device 0, position 2)",
        )

    def test_a_weight_action_on_another_device_is_named(self):
        self.refuse(
            [["F0.0", "B0.0", "W1.0"], ["F1.0", "B1.0"]],
            "W1.0 (device 0, position 2) but F1.0 (device 1, position 0)",
        )

    def test_a_backward_before_its_forward_is_named(self):
        self.refuse(
            [["F0.0", "B0.0"], ["B1.0", "F1.0"]],
            "never ends: B1.0 (device 1, position 0) waits for F1.0 "
            "(device 1, position 1).",
        )

    def test_weight_gradients_before_their_backward_are_named(self):
        self.refuse(
            [["F0.0", "W0.0", "B0.0"]],
            "W0.0 (device 0, position 1) waits for B0.0",
        )

    def test_devices_that_wait_for_each_other_are_named(self):
        # Device 0 wants B0.0 before it sends F0.1, device 1 F1.1 before B1.0.
        self.refuse(
            [
                ["F0.0", "B0.0", "F0.1", "B0.1"],
                ["F1.0", "F1.1", "B1.0", "B1.1"],
            ],
            "B0.0 (device 0, position 1) waits for B1.0 (device 1, position "
            "2); F1.1 (device 1, position 1) waits for F0.1 (device 0, "
            "position 2). Move",
        )

    def test_an_idle_device_is_refused(self):
        self.refuse([["F0.0", "B0.0"], []], "at least one action", "[2, 0]")
        self.refuse([], "0 devices")

    @parameterized.parameters("X0.0", "F0", "F-1.0", "f0.0", "")
    def test_an_unreadable_action_is_quoted(self, text):
        self.refuse([[text]], "kind out of F, B, W", repr(text), "'F1.3'")

    def test_a_kind_unknown_or_a_negative_index_is_refused(self):
        self.refuse([[Action("Z", 0, 0)]], "'Z0.0'")
        self.refuse([[Action("F", 0, -1)]], "'F0.-1'")

    def test_actions_may_be_strings_or_actions(self):
        self.assertEqual(
            Schedule([["F0.0", Action("B", 0, 0)]]),
            Schedule(((Action("F", 0, 0), "B0.0"),)),
        )

    def test_weight_actions_may_be_there_for_some_microbatches_only(self):
        schedule = Schedule([["F0.0", "B0.0", "F0.1", "B0.1", "W0.1"]])
        self.assertFalse(schedule.has_weight_action(0, 0))
        self.assertTrue(schedule.has_weight_action(0, 1))


class GetScheduleTest(parameterized.TestCase):
    def test_names(self):
        self.assertEqual(get_schedule("gpipe", 2, 3), gpipe(2, 3))
        self.assertEqual(get_schedule("1f1b", 2, 3), one_f_one_b(2, 3))

    def test_a_schedule_object_is_taken_as_it_is(self):
        schedule = interleaved(2, 4, 2)
        self.assertIs(get_schedule(schedule, 2, 4), schedule)

    @parameterized.parameters((3, 4), (2, 8))
    def test_a_schedule_for_other_sizes_is_refused(self, *sizes):
        with self.assertRaisesRegex(
            ValueError,
            "Received: schedule 'gpipe' for 2 devices and 4 microbatches, to "
            f"be used with {sizes[0]} devices and num_microbatches={sizes[1]}"
            ". Make it for these sizes",
        ):
            get_schedule(gpipe(2, 4), *sizes)

    @parameterized.parameters("GPipe", None, [["F0.0"]])
    def test_an_unknown_name_is_refused(self, name):
        with self.assertRaisesRegex(ValueError, "'gpipe', '1f1b'. Received: "):
            get_schedule(name, 2, 4)


class PurityTest(absltest.TestCase):
    def test_planning_loads_without_tensorflow_and_keras(self):
        # The packages' own __init__ files import Keras; stand-ins for them
        # show that the modules do not.
        root = pathlib.Path(__file__).parents[3] / "tfscale"
        program = f"""
import importlib, sys, types
for name, path in (("tfscale", {str(root)!r}),
                   ("tfscale.pipeline", {str(root / "pipeline")!r})):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
for name in ("action", "schedule", "simulate", "balance", "timeline"):
    importlib.import_module("tfscale.pipeline.planning." + name)
print(sorted({{"tensorflow", "keras", "numpy"}} & set(sys.modules)))
"""
        result = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
        )
        self.assertEqual(result.stdout.strip(), "[]")


if __name__ == "__main__":
    absltest.main()
