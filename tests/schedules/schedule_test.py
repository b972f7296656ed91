"""Schedules against literal tables, and what their validator refuses."""

import itertools
import pathlib
import random
import re
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from tfscale.schedules.action import Action
from tfscale.schedules.action import dependencies
from tfscale.schedules.list_schedule import list_schedule
from tfscale.schedules.looped_schedules import interleaved
from tfscale.schedules.looped_schedules import zb1p
from tfscale.schedules.looped_schedules import zb_h1
from tfscale.schedules.named_schedules import SCHEDULES
from tfscale.schedules.named_schedules import fastest
from tfscale.schedules.named_schedules import get_schedule
from tfscale.schedules.named_schedules import gpipe
from tfscale.schedules.named_schedules import one_f_one_b
from tfscale.schedules.named_schedules import pipedream
from tfscale.schedules.schedule import Schedule
from tfscale.schedules.simulate import simulate

# B alone takes as long as F and as W.
SPLIT = dict(backward=2, weight=1)
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


def as_pytorch(schedule):
    """The row of each device, written as in PyTorch's artifacts."""
    return [
        " ".join(f"{a.stage}{a.kind}{a.microbatch}" for a in row)
        for row in schedule.actions
    ]


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
        for make in (gpipe, one_f_one_b):
            with self.assertRaisesRegex(ValueError, f"={min(sizes)}[.]$"):
                make(*sizes)


class FiguresTest(parameterized.TestCase):
    @parameterized.parameters(
        ("gpipe", 3, 4, {}),
        ("1f1b", 3, 4, {}),
        ("interleaved", 2, 4, {}),
        ("looped_bfs", 2, 3, {}),
        ("zb1p", 2, 2, SPLIT),
        ("zb_h1", 3, 4, SPLIT),
        ("zb_h2", 2, 4, SPLIT),
        ("zb_v", 2, 3, SPLIT),
        ("dualpipev", 2, 4, {"weight": 0}),
    )
    def test_each_schedule_is_what_its_docstring_draws(
        self, name, devices, microbatches, costs
    ):
        drawn = re.findall(
            r"^ {8}device \d  ([ FBWfbw\d]+)$",
            SCHEDULES[name].__doc__,
            re.MULTILINE,
        )
        schedule = get_schedule(name, devices, microbatches)
        self.assertEqual(drawn, table(schedule, **costs))


class PipeDreamTest(parameterized.TestCase):
    def test_versions_are_those_of_the_paper(self):
        # Section 3.3: of batch b, stage s of S has seen the updates of all
        # batches before b - (S - 1 - s).
        def versions(**options):
            schedule = pipedream(3, num_batches=6, **options)
            return [
                [schedule.version(stage, batch) for batch in range(6)]
                for stage in range(3)
            ]

        self.assertEqual(
            versions(),
            [[0, 0, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]],
        )
        self.assertEqual(versions(vertical_sync=True), [[0, 0, 0, 1, 2, 3]] * 3)

    @parameterized.parameters((2, 4), (3, 2), (4, 3), (4, 8))
    def test_several_microbatches_have_two_versions(self, stages, microbatches):
        # PipeDream-2BW: the weights of the batch before.
        schedule = pipedream(stages, microbatches, num_batches=5)
        for stage in range(stages):
            found = [schedule.version(stage, batch) for batch in range(5)]
            self.assertEqual(found, [0, 0, 1, 2, 3])
            self.assertEqual(schedule.staleness(stage), 1)

    def test_only_a_window_has_a_bubble(self):
        simulation = simulate(pipedream(4, num_batches=32))
        self.assertAlmostEqual(simulation.bubble, 3 / 35)
        updates = simulate(pipedream(4, num_batches=32), update=1.0)
        self.assertAlmostEqual(updates.busy[0] - simulation.busy[0], 32.0)

    @parameterized.parameters(
        ([["F0.0", "U0.0", "B0.0"]], r"U0.0 \(device 0, position 1\)"),
        (
            [["F0.0", "F0.1", "B0.0", "B0.1", "U0.1", "U0.0"]],
            r"U0.1 \(device 0, position 4\)",
        ),
        ([["F0.0", "B0.0", "U0.0"], ["F1.0", "B1.0"]], "without U1.0"),
        (
            [["F0.0", "B0.0", "U0.0", "F0.1", "B0.1", "F0.2", "B0.2", "U0.1"]],
            "3 microbatches and updates of 2 batches",
        ),
    )
    def test_a_wrong_update_is_refused(self, actions, received):
        with self.assertRaisesRegex(ValueError, f"Received: .*{received}"):
            Schedule(actions)

    def test_a_schedule_of_ones_own_has_no_updates(self):
        with self.assertRaisesRegex(ValueError, "so has a name"):
            get_schedule(pipedream(2, num_batches=4), 2, 4)


class LoopedSchedulesTest(parameterized.TestCase):
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
            table(zb_h1(3, 4), backward=2, weight=1),
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
        schedule = zb_h1(stages, microbatches)
        simulation = simulate(schedule, forward=1, backward=2, weight=1)
        idle = [simulation.makespan - busy for busy in simulation.busy]
        self.assertEqual(idle, [stages - 1] * stages)
        self.assertLessEqual(max(simulation.peak_in_flight), stages)
        self.assertTrue(schedule.has_weight_action(0, 0))
        self.assertFalse(gpipe(2, 2).has_weight_action(0, 0))

    @parameterized.parameters((2, 4), (3, 7), (4, 8))
    def test_zero_bubble_of_one_stage_a_device_is_h1(self, *sizes):
        self.assertEqual(zb1p(*sizes, 1).actions, zb_h1(*sizes).actions)

    def test_zb1p_has_the_order_of_pytorch(self):
        # test/distributed/pipelining/artifacts/zb1p_2rank_2stagep_compute.csv
        # of PyTorch, without the steps in which a rank waits.
        expected = (
            "0F0 0F1 2F0 2F1 2B0 2W0 0F2 2B1 2W1 0F3 0B0 0W0 2F2 0B1 0W1 2F3 "
            "2B2 2W2 0F4 2B3 2W3 0F5 0B2 0W2 2F4 0B3 0W3 2F5 2B4 2W4 0F6 2B5 "
            "2W5 0F7 0B4 0W4 2F6 0B5 0W5 2F7 2B6 2W6 2B7 2W7 0B6 0W6 0B7 0W7",
            "1F0 1F1 3F0 3B0 3F1 3B1 3W0 1F2 1B0 3W1 1F3 1B1 1W0 3F2 3B2 1W1 "
            "3F3 3B3 3W2 1F4 1B2 3W3 1F5 1B3 1W2 3F4 3B4 1W3 3F5 3B5 3W4 1F6 "
            "1B4 3W5 1F7 1B5 1W4 3F6 3B6 1W5 3F7 3B7 3W6 1B6 3W7 1B7 1W6 1W7",
        )
        self.assertEqual(as_pytorch(zb1p(2, 8, 2)), list(expected))

    @parameterized.parameters("interleaved", "zb1p")
    def test_groups_of_unequal_size_are_refused(self, name):
        with self.assertRaisesRegex(
            ValueError,
            "num_microbatches=9 on 4 .* Use num_microbatches=8 or 10",
        ):
            get_schedule(name, 4, 9)
        for num_microbatches in (8, 10):
            get_schedule(name, 4, num_microbatches)


class VSchedulesTest(parameterized.TestCase):
    def test_dualpipev_has_the_order_of_pytorch(self):
        # test/distributed/pipelining/artifacts/dualpipev_4rank_10mb.csv of
        # PyTorch: the first and the last rank, with each overlapped pair as
        # its F and then its B, and I (gradients of inputs alone) as B.
        expected = (
            "0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7B0 7W0 7F1 7B1 7W1 7F2 7B2 7W2 "
            "7F3 0F7 7B3 7F4 0B0 0F8 7B4 7F5 0B1 0F9 7B5 7F6 0B2 7B6 7F7 0B3 "
            "7B7 7F8 0B4 7B8 7F9 0B5 7B9 0B6 0W6 0B7 0W7 0B8 0W8 0B9 0W9",
            "3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 3F4 4B0 4F4 3B0 3F5 4B1 4F5 3B1 "
            "3F6 4B2 4F6 3B2 3F7 4B3 4F7 3B3 3F8 4B4 4F8 3B4 3F9 4B5 4F9 3B5 "
            "4B6 3B6 4B7 3B7 4B8 3B8 4B9 3B9 4W8 3W8 4W9 3W9",
        )
        found = as_pytorch(get_schedule("dualpipev", 4, 10))
        self.assertEqual([found[0], found[3]], list(expected))

    @parameterized.parameters((2, 4), (4, 8), (4, 16), (3, 6))
    def test_only_the_start_and_the_end_are_idle(self, devices, microbatches):
        # Half of (D - 1)(F + B - W) of ZB-H1, with as many activations as
        # 1F1B has on its first device (Qi et al. 2024).
        schedule = get_schedule("zb_v", devices, microbatches)
        self.assertEqual(
            schedule.stage_devices,
            (*range(devices), *reversed(range(devices))),
        )
        simulation = simulate(
            schedule, forward=0.5, backward=1, weight=0.5, activation_bytes=1
        )
        idle = simulation.makespan - max(simulation.busy)
        self.assertEqual(idle, (devices - 1) / 2)
        self.assertEqual(max(simulation.peak_device_bytes), 2 * devices)

    @parameterized.parameters((2, 6), (3, 10), (4, 16))
    def test_h2_works_without_a_gap(self, devices, microbatches):
        # With 2 D - 1 microbatches in flight (Qi et al. 2023, section 3.2).
        schedule = get_schedule("zb_h2", devices, microbatches)
        simulation = simulate(schedule, **SPLIT, activation_bytes=1)
        for device in range(devices):
            spans = [s for s in simulation.spans if s.device == device]
            self.assertEqual(spans[-1].end - spans[0].start, 3 * microbatches)
        self.assertEqual(max(simulation.peak_device_bytes), 2 * devices - 1)

    @parameterized.parameters((2, 4, 2), (4, 8, 2), (3, 5, 3))
    def test_breadth_first_divides_the_bubble(self, devices, microbatches, v):
        # The bubble is that of `interleaved` (Lamy-Poirier 2022).
        schedule = get_schedule("looped_bfs", devices, microbatches, v)
        simulation = simulate(schedule, activation_bytes=1)
        self.assertAlmostEqual(
            simulation.makespan / simulation.busy[0] - 1,
            (devices - 1) / (v * microbatches),
        )
        self.assertEqual(max(simulation.peak_device_bytes), v * microbatches)

    def test_dualpipev_needs_as_many_microbatches_as_stages(self):
        with self.assertRaisesRegex(ValueError, "num_microbatches=7 on 4"):
            get_schedule("dualpipev", 4, 7)


class NamedSchedulesTest(parameterized.TestCase):
    @parameterized.parameters(
        ("gpipe", 33, 8),
        ("1f1b", 33, 4),
        ("interleaved", 28.5, 11),
        ("looped_bfs", 28.5, 16),
        ("zb_h1", 27, 4),
        ("zb_h2", 27, 7),
        ("zb1p", 25.5, 8),
        ("zb_v", 25.5, 8),
        ("dualpipev", 25.5, 9),
    )
    def test_time_and_memory_of_8_microbatches_on_4_devices(
        self, name, makespan, most_held
    ):
        # F, B and W of a whole device take 1 each, 24 in all. What is held is
        # counted in stages, of which some schedules have two on a device.
        schedule = get_schedule(name, 4, 8)
        per_stage = 4 / schedule.num_stages
        simulation = simulate(
            schedule,
            forward=per_stage,
            backward=2 * per_stage,
            weight=per_stage,
            activation_bytes=1,
        )
        self.assertEqual(simulation.makespan, makespan)
        self.assertEqual(max(simulation.peak_device_bytes), most_held)

    @parameterized.product(
        devices=(1, 2, 3, 4), microbatches=(1, 2, 3, 4, 7, 8, 10)
    )
    def test_all_sizes_that_are_not_refused_run(self, devices, microbatches):
        # A `Schedule` checks itself. Only equal groups are a rule of sizes.
        groups = max(1, microbatches // devices)
        for name in SCHEDULES:
            try:
                schedule = get_schedule(name, devices, microbatches)
            except ValueError:
                self.assertTrue(
                    (name == "dualpipev" and microbatches < 2 * devices)
                    or (
                        name in ("interleaved", "zb1p")
                        and microbatches % groups
                    ),
                    name,
                )
            else:
                self.assertEqual(schedule.num_devices, devices)
                self.assertEqual(schedule.num_microbatches, microbatches)

    @parameterized.parameters(
        ("1f1b", 2, "'1f1b' has 1 stage on each device"),
        ("zb_v", 3, "'zb_v' has 2 stages on each device"),
        ("interleaved", 1, "needs two or more stages"),
    )
    def test_other_numbers_of_stages_are_refused(self, name, stages, text):
        with self.assertRaisesRegex(
            ValueError, f"{text}.*stages_per_device={stages}"
        ):
            get_schedule(name, 4, 8, stages)

    def test_a_schedule_says_itself_how_many_stages_there_are(self):
        schedule = gpipe(2, 4)
        self.assertIs(get_schedule(schedule, 2, 4, 1), schedule)
        with self.assertRaisesRegex(ValueError, "stages_per_device=2"):
            get_schedule(schedule, 2, 4, 2)


class AutoTest(parameterized.TestCase):
    def fastest(self, stage_costs, devices, microbatches, **kwargs):
        costs = dict(
            forward=stage_costs,
            backward=[2 * cost for cost in stage_costs],
            weight=stage_costs,
        )
        base = get_schedule(
            "auto", devices, microbatches, len(stage_costs) // devices
        )
        best = fastest(base, **costs, **kwargs)
        return best, *(simulate(each, **costs) for each in (best, base))

    @parameterized.product(seed=tuple(range(6)), per_device=(1, 2, 3))
    def test_none_that_has_a_name_is_faster_in_that_memory(
        self, seed, per_device
    ):
        rng = random.Random(seed)
        devices, microbatches = rng.choice([(2, 4), (4, 8), (3, 5)])
        costs = [rng.uniform(1, 2) for _ in range(devices * per_device)]
        best, simulation, base = self.fastest(costs, devices, microbatches)

        def held(schedule):
            each = simulate(schedule, activation_bytes=1).peak_device_bytes
            return max(each)

        self.assertLessEqual(held(best), held(base.schedule))
        for name in SCHEDULES:
            try:
                other = get_schedule(name, devices, microbatches, per_device)
            except ValueError:
                continue
            if held(other) <= held(base.schedule):
                other = simulate(
                    other,
                    forward=costs,
                    backward=[2 * cost for cost in costs],
                    weight=costs,
                )
                self.assertLessEqual(simulation.makespan, other.makespan)

    def test_what_does_not_fit_is_not_taken(self):
        best, *_ = self.fastest([1, 1, 1, 1], 4, 8)
        self.assertEqual(best.name, "auto: zb_h1")
        best, *_ = self.fastest([1, 1, 1, 1], 4, 8, fits=lambda _: False)
        self.assertEqual(best.name, "auto: 1f1b")

    @parameterized.product(
        devices=(1, 2, 4), per_device=(1, 2, 3), microbatches=(1, 3, 8)
    )
    def test_list_schedules_end_whatever_room_there_is(
        self, devices, per_device, microbatches
    ):
        there = list(range(devices))
        stages = devices * per_device
        costs = dict(
            forward=[1] * stages, backward=[2] * stages, weight=[1] * stages
        )
        for back in (there, there[::-1]):
            placement = [
                device
                for loop in range(per_device)
                for device in (back if loop % 2 else there)
            ]
            for room in (per_device, stages, 2 * stages):
                schedule = list_schedule(placement, microbatches, room, **costs)
                held = simulate(schedule, activation_bytes=1)
                self.assertLessEqual(max(held.peak_device_bytes), room)


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
            "F0.0 (device 0, position 1), which occurs 2 times",
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
            "Received: schedule 'gpipe' for 2 devices and 4 microbatches, "
            f"with {sizes[0]} devices and num_microbatches={sizes[1]}",
        ):
            get_schedule(gpipe(2, 4), *sizes)

    @parameterized.parameters("GPipe", None, [["F0.0"]])
    def test_an_unknown_name_is_refused(self, name):
        with self.assertRaisesRegex(
            ValueError, "'pipedream', .*, '1f1b', .*'dualpipev'. Received: "
        ):
            get_schedule(name, 2, 4)


class PurityTest(absltest.TestCase):
    def test_planning_loads_without_tensorflow_and_keras(self):
        # The file __init__ of tfscale imports Keras; a stand-in for it shows
        # that the package does not.
        root = pathlib.Path(__file__).parents[2] / "tfscale"
        program = f"""
import importlib, sys, types
sys.modules["tfscale"] = types.ModuleType("tfscale")
sys.modules["tfscale"].__path__ = [{str(root)!r}]
for name in ("action", "schedule", "simulate", "balance", "timeline"):
    importlib.import_module("tfscale.schedules." + name)
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
