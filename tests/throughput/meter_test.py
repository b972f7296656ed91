from absl.testing import absltest
from absl.testing import parameterized

from tfscale.throughput.meter import Meter
from tfscale.throughput.meter import waiting


class MeterTest(parameterized.TestCase):
    @parameterized.parameters(
        # One batch: from the beginning to its arrival.
        ([1.0], 1.0),
        ([-1.0], 0.0),  # read ahead
        ([4.0], 4.0),
        # Each takes 1.5, after a wait of 1.
        ([1.0, 2.5], 1.0),
        # Each takes 1, and both are waited for.
        ([1.0, 3.0], 2.0),
        # The second arrives while the first is computed.
        ([0.0, 1.0], 0.0),
        ([-3.0, -2.0, -1.0, 0.0], 0.0),
        # The last one is late, the others are there.
        ([0.0, 0.0, 3.0], 1.0),
        ([], 0.0),
    )
    def test_waiting_is_what_batches_of_equal_times_leave(self, arrivals, wait):
        asked = [-9.0] * len(arrivals)
        self.assertAlmostEqual(waiting(0.0, 4.0, asked, arrivals), wait)

    @parameterized.parameters(
        ([0.75], [1.0], 0.25),
        ([-1.0], [1.0], 1.0),
        # As many are made as asked for: each in 0.25.
        ([0.25, 2.0], [0.5, 2.25], 0.5),
    )
    def test_nothing_waits_before_it_asks(self, asked, arrivals, wait):
        self.assertAlmostEqual(waiting(0.0, 4.0, asked, arrivals), wait)

    def test_steps_are_added_up(self):
        meter = Meter()
        meter.add(0.0, 4.0, [0.0], [1.0], 8, 80)
        meter.add(5.0, 6.0, [3.0, 4.0], [4.0, 4.5], 9, 90)
        self.assertEqual(meter, Meter(3, 17, 170, 5.0, 1.0))


if __name__ == "__main__":
    absltest.main()
