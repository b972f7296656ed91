from absl.testing import absltest
from absl.testing import parameterized

from tfscale.profiling.breakdown import Event
from tfscale.profiling.breakdown import Recording
from tfscale.profiling.breakdown import shares
from tfscale.profiling.layer_times import layer_times
from tfscale.schedules.named_schedules import gpipe
from tfscale.schedules.named_schedules import one_f_one_b
from tfscale.schedules.simulate import simulate


class BreakdownTest(parameterized.TestCase):
    @parameterized.product(
        schedule=(gpipe, one_f_one_b), stages=(2, 4), number=(1, 3, 8)
    )
    def test_bubble_is_that_of_the_simulation(self, schedule, stages, number):
        simulation = simulate(schedule(stages, number))
        events = [
            Event(f"d{s.device}", s.start, s.end, f"a/stage_{s.device}/mul")
            for s in simulation.spans
        ]
        end = max(event.end for event in events)
        # A quarter of the step waits for input before the pipeline begins.
        recording = Recording(events, [(-end / 3, end)], [(-end / 3, 0)])
        devices = [f"d{stage}" for stage in range(stages)]
        found = shares(recording, [devices])
        mean = sum(each.bubble for each in found.values()) / stages
        self.assertAlmostEqual(mean, 0.75 * simulation.bubble)
        for each in found.values():
            self.assertAlmostEqual(each.input_wait, 0.25)
            self.assertAlmostEqual(each.idle, each.input_wait + each.bubble)

    def test_events_outside_of_steps_do_not_count(self):
        events = [Event("a", 0, 4, "x"), Event("a", 10, 20, "y", "data")]
        found = shares(Recording(events, [(2, 6), (16, 20)], []))["a"]
        self.assertEqual((found.compute, found.communicating), (0.25, 0.5))
        self.assertEqual((found.both, found.overlap, found.idle), (0, 0, 0.25))

    def test_communication_by_axis_and_at_once(self):
        events = [
            Event("a", 0, 10, "mul"),
            Event("a", 5, 15, "x", "data"),
            Event("a", 5, 10, "y", "model"),
        ]
        found = shares(Recording(events, [(0, 20)], []))["a"]
        self.assertEqual(found.communication, {"data": 0.5, "model": 0.25})
        self.assertEqual((found.communicating, found.both), (0.5, 0.25))
        self.assertEqual(found.overlap, 0.5)


class LayerTimesTest(absltest.TestCase):
    def test_numbered_scopes_are_matched(self):
        # Of layers dense, dense_1, dense_2, whose names were taken.
        events = [
            Event("a", 0, 1, "f/model_1/dense_1/MatMul"),
            Event("a", 1, 3, "f/model_1/dense_1_2/MatMul"),
            Event("a", 3, 7, "f/gradient_tape/model_1/dense_1_2/MatMul"),
            Event("a", 7, 15, "f/model_1/dense_2_1/MatMul"),
            Event("a", 15, 16, "f/sgd/update_0/Mul"),
            Event("a", 15, 99, "f/model_1/dense_1/x", "data"),
        ]
        found = layer_times(events, ["dense", "dense_1", "dense_2"])
        self.assertEqual(
            list(found.items()),
            [("dense_2", (8, 0)), ("dense_1", (2, 4)), ("dense", (1, 0))],
        )

    def test_the_innermost_layer_and_gradients_of_functions(self):
        events = [
            Event("a", 0, 1, "PartitionedCall_3/stage_0/block/inner/MatMul"),
            Event(
                "a",
                1,
                4,
                "PartitionedCall_4/stage_0/gradients/stage_0/block/inner/"
                "MatMul_grad/MatMul",
            ),
            Event("a", 4, 9, "PartitionedCall_3/stage_0/block/add"),
        ]
        found = layer_times(events, ["block", "inner"])
        self.assertEqual(found, {"block": (5, 0), "inner": (1, 3)})


if __name__ == "__main__":
    absltest.main()
