import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tfscale.throughput.arrivals import Arrival
from tfscale.throughput.steps import Meter
from tfscale.throughput.steps import Steps
from tfscale.throughput.steps import waiting


class _Data:
    """Batches that arrive when a test says so."""

    iterator = 1

    def __init__(self):
        self.arrivals, self.batches = self, {}

    def read(self):
        return lambda *of_batch: self.batches.get(of_batch)


class _Clocks:
    """A clock that is never set, and one that is ahead of it by a lead."""

    def __init__(self, test):
        self.now, self.lead = 100.0, 1e9
        for name, read in (
            ("monotonic", lambda: self.now),
            ("time", lambda: self.now + self.lead),
        ):
            patch = mock.patch.object(time, name, read)
            patch.start()
            test.addCleanup(patch.stop)


class StepsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.clocks = _Clocks(self)
        self.data = _Data()
        self.steps = Steps(self.data)
        self.steps.begin_epoch()
        self.number = 0

    def step(self, seconds=1.0, wait=0.0, shape=0, rows=4, function=None):
        """A step whose batch arrives `wait` after it has begun."""
        clocks = self.clocks
        self.steps.begin(self.number, self.number, 1, function)
        self.data.batches[1, self.number] = Arrival(
            clocks.now + clocks.lead,
            clocks.now + clocks.lead + wait,
            rows,
            0,
            shape,
        )
        clocks.now += seconds
        self.steps.end(self.number)
        self.number += 1
        self.steps.add_up()

    def sums(self):
        meter = self.steps.meter
        return meter.rows, meter.seconds, meter.waited

    def test_the_first_step_of_each_shape_is_left_out(self):
        self.step(seconds=60.0)
        self.assertEqual(self.sums(), (0, 0.0, 0.0))
        self.step()
        self.step(seconds=30.0, shape=5, rows=3)
        self.step(shape=5, rows=3)
        self.assertEqual(self.sums(), (7, 2.0, 0.0))

    def test_the_first_step_of_another_function_is_left_out(self):
        self.step()
        self.step()
        self.step(seconds=30.0, function="anew")
        self.step(function="anew")
        self.assertEqual(self.sums(), (8, 2.0, 0.0))

    def test_time_between_steps_does_not_count(self):
        for _ in range(4):
            self.step()
            self.clocks.now += 100.0  # validation, a save
        self.assertEqual(self.sums(), (12, 3.0, 0.0))

    def test_a_step_counts_from_when_the_last_one_was_done(self):
        # Accelerators are behind: a step begins before the last results.
        steps, batches = self.steps, self.data.batches
        for number in range(4):
            steps.begin(number, number, 1, None)
            batches[1, number] = Arrival(0.0, self.clocks.lead + 100.0, 4, 0, 0)
        for number in range(4):
            self.clocks.now += 2.0
            steps.end(number)
        steps.add_up()
        self.assertEqual(self.sums(), (12, 6.0, 0.0))

    def test_results_may_come_in_other_threads(self):
        for number in range(50):
            self.steps.begin(number, number, 1, None)
            self.data.batches[1, number] = Arrival(0.0, 0.0, 4, 0, 0)
        threads = [
            threading.Thread(target=self.steps.end, args=[number])
            for number in range(50)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.steps.add_up()
        self.assertEqual(self.steps.meter.rows, 49 * 4)

    @parameterized.parameters(-3600.0, 3600.0, 0.05)
    def test_a_clock_that_is_set_changes_no_figure(self, by):
        # The share was 1e5 after a clock had been set back by an hour.
        self.step()
        for index in range(20):
            if index == 10:  # within a step
                self.steps.begin(self.number, self.number, 1, None)
                self.data.batches[1, self.number] = Arrival(
                    self.clocks.now + self.clocks.lead,
                    self.clocks.now + self.clocks.lead + 0.25,
                    *(4, 0, 0),
                )
                self.clocks.lead += by
                self.clocks.now += 1.0
                self.steps.end(self.number)
                self.number += 1
            self.step(wait=0.25)
        rows, seconds, waited = self.sums()
        self.assertAlmostEqual(waited / seconds, 0.25)
        self.assertAlmostEqual(rows / seconds, 4.0)

    def test_a_clock_that_is_set_after_a_batch_was_read_ahead(self):
        self.step()
        clocks = self.clocks
        for _ in range(3):
            self.data.batches[1, self.number] = Arrival(
                clocks.now + clocks.lead - 2.0,
                clocks.now + clocks.lead - 1.0,
                *(4, 0, 0),
            )
            clocks.lead -= 3600.0
            self.steps.begin(self.number, self.number, 1, None)
            clocks.now += 1.0
            self.steps.end(self.number)
            self.number += 1
            self.step(wait=0.5)
        rows, seconds, waited = self.sums()
        self.assertAlmostEqual(waited / seconds, 0.5)
        self.assertEqual(rows, 3 * 4)


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
