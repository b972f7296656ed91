"""What repeats in a schedule, against literal tables."""

import random

from absl.testing import absltest
from absl.testing import parameterized

from tfscale.schedules import steady
from tfscale.schedules.action import Action
from tfscale.schedules.named_schedules import SCHEDULES
from tfscale.schedules.named_schedules import get_schedule
from tfscale.schedules.schedule import Schedule


def text(actions):
    return " ".join(map(str, actions))


def table(actions):
    """Each part of it: how often, how many microbatches further, and what."""
    return [
        (repeats, period, text(body))
        for body, repeats, period in steady.find_repeats(actions)
    ]


def users(schedule):
    """What the stages of a chain make and read."""
    makers, readers = {}, {"x0": {("F", 0)}}
    for stage in range(schedule.num_stages):
        makers[f"saved{stage}"] = {("F", stage)}
        readers[f"saved{stage}"] = {("B", stage)}
        makers[f"x{stage + 1}"] = {("F", stage)}
        readers[f"x{stage + 1}"] = {("F", stage + 1)}
        makers[f"g{stage}"] = {("B", stage)}
        readers[f"g{stage}"] = {("B", stage - 1)}
    readers[f"x{schedule.num_stages}"] = readers["g0"] = set()
    return makers, readers


def find_loops(schedule, results=frozenset()):
    return steady.find_loops(list(schedule.order()), *users(schedule), results)


class FindRepeatsTest(parameterized.TestCase):
    def test_one_stage_repeats_forward_and_backward(self):
        self.assertEqual(
            table(get_schedule("1f1b", 1, 32).order()), [(32, 1, "F0.0 B0.0")]
        )

    def test_1f1b_repeats_once_the_pipeline_is_full(self):
        self.assertEqual(
            table(get_schedule("1f1b", 2, 9).order()),
            [
                (1, 0, "F0.0 F0.1 F1.0"),
                (7, 1, "B1.0 B0.0 F1.1 F0.2"),
                (1, 0, "B1.7 B0.7 F1.8 B1.8 B0.8"),
            ],
        )

    def test_zero_bubble_repeats_its_weight_gradients_too(self):
        self.assertEqual(
            table(get_schedule("zb_h1", 2, 9).order()),
            [
                (1, 0, "F0.0 F0.1 F1.0 B1.0"),
                (7, 1, "B0.0 F1.1 W0.0 B1.1 F0.2 W1.0"),
                (1, 0, "B0.7 F1.8 W0.7 B1.8 B0.8 W1.7 W0.8 W1.8"),
            ],
        )

    def test_interleaved_stages_repeat_after_a_microbatch_of_each_device(self):
        repeats = steady.find_repeats(
            get_schedule("interleaved", 2, 16).order()
        )
        self.assertEqual(
            [(len(body), *times) for body, *times in repeats],
            [(6, 1, 0), (16, 7, 2), (10, 1, 0)],
        )

    def test_gpipe_repeats_forwards_and_then_backwards(self):
        self.assertEqual(
            table(get_schedule("gpipe", 2, 8).order()),
            [
                (1, 0, "F0.0"),
                (7, 1, "F0.1 F1.0"),
                (1, 0, "F1.7"),
                (8, 1, "B1.0 B0.0"),
            ],
        )

    def test_few_microbatches_repeat_nothing(self):
        ((_, repeats, _),) = steady.find_repeats(
            get_schedule("1f1b", 2, 4).order()
        )
        self.assertEqual(repeats, 1)

    @parameterized.product(
        name=(*SCHEDULES, "auto"), devices=(1, 2, 4), microbatches=(8, 32)
    )
    def test_no_action_is_lost_or_moved(self, name, devices, microbatches):
        actions = list(get_schedule(name, devices, microbatches).order())
        found = steady.find_repeats(actions)
        unrolled = [action for part in found for action in part.unrolled()]
        self.assertEqual(unrolled, actions)
        if microbatches == 32:
            written = sum(len(part.actions) for part in found)
            self.assertLess(2 * written, len(actions))

    def test_a_schedule_that_only_seems_to_have_a_period(self):
        # One microbatch of stage 1 waits for the next one.
        rows = [list(row) for row in get_schedule("1f1b", 1, 32).actions]
        rows[0][20:24] = [rows[0][i] for i in (20, 22, 23, 21)]
        self.assertEqual(
            table(Schedule(rows).order()),
            [
                (10, 1, "F0.0 B0.0"),
                (1, 0, "F0.10 F0.11 B0.11 B0.10"),
                (20, 1, "F0.12 B0.12"),
            ],
        )

    def test_any_order_comes_out_as_it_went_in(self):
        generator = random.Random(0)
        for _ in range(50):
            actions = [
                Action(kind, stage, microbatch)
                for microbatch in range(12)
                for stage in range(2)
                for kind in "FB"
            ]
            for _ in range(generator.randrange(6)):
                one, other = generator.sample(range(len(actions)), 2)
                actions[one], actions[other] = actions[other], actions[one]
            found = steady.find_repeats(actions, min_repeats=2)
            unrolled = [action for part in found for action in part.unrolled()]
            self.assertEqual(unrolled, actions)


class FindLoopsTest(absltest.TestCase):
    def test_registers_hold_what_is_in_flight(self):
        _, loop, _ = find_loops(get_schedule("1f1b", 2, 9), {"x2"})
        self.assertCountEqual(
            loop.registers,
            # Stage 0 is two microbatches ahead, stage 1 one.
            [(0, "saved0"), (1, "saved0"), (0, "saved1"), (1, "x1")],
        )
        self.assertEqual(loop.consumed, ("x0",))
        self.assertEqual(loop.made, ("x2",))

    def test_one_stage_keeps_nothing(self):
        (loop,) = find_loops(get_schedule("1f1b", 1, 8))
        self.assertEqual(loop[1:], ((), ("x0",), ()))

    def test_gpipe_keeps_what_all_microbatches_save(self):
        _, forwards, _, backwards = find_loops(get_schedule("gpipe", 2, 8))
        self.assertEqual(forwards.made, ("saved0", "saved1"))
        self.assertEqual(forwards.registers, ((0, "x1"),))
        self.assertEqual(backwards.consumed, ("saved0", "saved1"))
        self.assertEqual(backwards.registers, ())

    def test_nothing_loops_whose_iterations_find_different_tensors(self):
        # A backward adds to what was made before the loop: not by a register.
        actions = [
            *(Action("B", 2, microbatch) for microbatch in range(8)),
            *(
                Action("B", stage, microbatch)
                for microbatch in range(8)
                for stage in (1, 0)
            ),
        ]
        makers = {"sum": {("B", 2), ("B", 1)}}
        parts = steady.find_loops(actions, makers, {"sum": {("B", 0)}})
        self.assertIsInstance(parts[-1], steady.Repeated)
        self.assertEqual(parts[-1], steady.Repeated(tuple(actions[8:])))


if __name__ == "__main__":
    absltest.main()
