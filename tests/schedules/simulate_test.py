"""The simulator against closed forms."""

import itertools

from absl.testing import absltest
from absl.testing import parameterized

from tfscale.schedules.named_schedules import gpipe
from tfscale.schedules.named_schedules import one_f_one_b
from tfscale.schedules.schedule import Schedule
from tfscale.schedules.simulate import peak_in_flight
from tfscale.schedules.simulate import simulate

SIZES = tuple(itertools.product(range(1, 9), (1, 2, 3, 4, 7, 8, 16, 33)))


class ClosedFormsTest(parameterized.TestCase):
    @parameterized.parameters(*SIZES)
    def test_bubble_and_speedup(self, num_stages, num_microbatches):
        s, m = num_stages, num_microbatches
        for make in (gpipe, one_f_one_b):
            for forward, backward in ((1.0, 1.0), (1.0, 2.0), (3.0, 4.5)):
                simulation = simulate(
                    make(s, m), forward=forward, backward=backward
                )
                self.assertAlmostEqual(
                    simulation.makespan, (m + s - 1) * (forward + backward)
                )
                self.assertAlmostEqual(simulation.bubble, (s - 1) / (m + s - 1))
                self.assertAlmostEqual(simulation.speedup, s * m / (m + s - 1))

    @parameterized.parameters(*SIZES)
    def test_microbatches_in_flight(self, num_stages, num_microbatches):
        s, m = num_stages, num_microbatches
        self.assertEqual(peak_in_flight(gpipe(s, m)), (m,) * s)
        self.assertEqual(
            peak_in_flight(one_f_one_b(s, m)),
            tuple(min(s - stage, m) for stage in range(s)),
        )

    @parameterized.parameters(*SIZES)
    def test_recomputing_adds_a_forward_to_each_backward(self, s, m):
        simulation = simulate(gpipe(s, m), recompute=True)
        self.assertAlmostEqual(simulation.makespan, (m + s - 1) * (1 + 1 + 2))
        # The speed-up is over a device that recomputes nothing.
        self.assertAlmostEqual(
            simulation.speedup, s * m * 3 / ((m + s - 1) * 4)
        )
        self.assertAlmostEqual(simulation.bubble, (s - 1) / (m + s - 1))

    def test_a_transfer_delays_each_stage_once_each_way(self):
        simulation = simulate(gpipe(4, 8), transfer=0.25)
        self.assertAlmostEqual(
            simulation.makespan, (8 + 4 - 1) * 3 + 2 * 3 * 0.25
        )

    def test_stages_on_one_device_transfer_nothing(self):
        schedule = Schedule([["F0.0", "F1.0", "B1.0", "B0.0"]])
        self.assertEqual(simulate(schedule, transfer=9.0).makespan, 6.0)

    def test_the_slowest_stage_sets_the_pace(self):
        # GPipe: the first microbatch passes all, the others wait for stage 1.
        simulation = simulate(
            gpipe(3, 5), forward=[1.0, 4.0, 2.0], backward=[2.0, 8.0, 4.0]
        )
        self.assertEqual(simulation.makespan, (7 + 4 * 4) + (14 + 4 * 8))
        self.assertEqual(simulation.busy, (15.0, 60.0, 30.0))
        self.assertAlmostEqual(simulation.speedup, 5 * 21 / 69)


class SpansTest(absltest.TestCase):
    def test_spans_say_when_each_action_runs(self):
        simulation = simulate(one_f_one_b(2, 2), forward=1.0, backward=2.0)
        self.assertEqual(
            [(str(a), d, start, end) for a, d, start, end in simulation.spans],
            [
                ("F0.0", 0, 0.0, 1.0),
                ("F0.1", 0, 1.0, 2.0),
                ("F1.0", 1, 1.0, 2.0),
                ("B1.0", 1, 2.0, 4.0),
                ("B0.0", 0, 4.0, 6.0),
                ("F1.1", 1, 4.0, 5.0),
                ("B1.1", 1, 5.0, 7.0),
                ("B0.1", 0, 7.0, 9.0),
            ],
        )

    def test_weight_gradients_take_their_share_of_the_backward(self):
        schedule = Schedule([["F0.0", "B0.0", "F0.1", "B0.1", "W0.1"]])
        spans = simulate(schedule, forward=1, backward=5, weight=2).spans
        lengths = {str(s.action): s.end - s.start for s in spans}
        self.assertEqual(
            lengths, {"F0.0": 1, "B0.0": 5, "F0.1": 1, "B0.1": 3, "W0.1": 2}
        )


class MemoryTest(absltest.TestCase):
    def test_activations_are_held_for_each_microbatch_in_flight(self):
        costs = {"activation_bytes": [10, 20, 30, 40]}
        self.assertEqual(
            simulate(gpipe(4, 16), **costs).peak_stage_bytes,
            (160, 320, 480, 640),
        )
        self.assertEqual(
            simulate(one_f_one_b(4, 16), **costs).peak_stage_bytes,
            (40, 60, 60, 40),
        )

    def test_recomputing_keeps_inputs_and_the_activations_of_one(self):
        simulation = simulate(
            one_f_one_b(2, 8),
            recompute=True,
            activation_bytes=100,
            stage_input_bytes=[1, 7],
        )
        self.assertEqual(simulation.peak_in_flight, (2, 1))
        self.assertEqual(simulation.peak_stage_bytes, (2 * 1 + 99, 100))

    def test_activations_wait_for_weight_gradients(self):
        schedule = Schedule([["F0.0", "B0.0", "F0.1", "B0.1", "W0.0", "W0.1"]])
        self.assertEqual(peak_in_flight(schedule), (2,))
        simulation = simulate(
            schedule, recompute=True, activation_bytes=10, stage_input_bytes=1
        )
        self.assertEqual(simulation.peak_stage_bytes, (20,))

    def test_a_device_holds_what_its_stages_hold_at_once(self):
        # Never both stages' peaks: the second is empty before F0.1.
        schedule = Schedule(
            [["F0.0", "F1.0", "B1.0", "F0.1", "B0.0", "F1.1", "B1.1", "B0.1"]]
        )
        simulation = simulate(schedule, activation_bytes=[3, 5])
        self.assertEqual(simulation.peak_stage_bytes, (6, 5))
        self.assertEqual(simulation.peak_device_bytes, (8,))


class BadInputTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"forward": [1.0]}, "`forward` must be one number or one per stage"),
        ({"backward": [1.0] * 3}, "Received: 3 numbers for 2 stages"),
        ({"transfer": -1.0}, "`transfer` must be finite and not negative"),
        ({"forward": float("nan")}, "Received: forward=nan"),
        ({"activation_bytes": -5}, "`activation_bytes` must be finite"),
        ({"backward": 1.0, "weight": 2.0}, "`weight` is a part of `backward`"),
        ({"forward": 0.0}, "At least one stage must take time"),
    )
    def test_costs_that_cannot_be_are_refused(self, costs, text):
        with self.assertRaisesRegex(ValueError, text):
            simulate(gpipe(2, 2), **costs)


if __name__ == "__main__":
    absltest.main()
