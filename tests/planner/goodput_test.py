"""The goodput is that of adaptdl, whose published values and rules hold.

Its `goodput_test.py` draws ten models of time and ten of gradients with seed 0.
"""

import itertools

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from tfscale.planner import goodput

# adaptdl's: a step has 128 rows or more; replicas, and rows of each.
ROWS_OF_REPLICAS = {1: 128, 2: 64, 3: 43, 4: 32, 5: 26}


def models(start):
    draw = np.random.RandomState(0)
    times = []
    for _ in range(10):
        a_c, b_c, a_n, b_n, a_r, b_r, g = draw.gamma(2.0, 2.0, [7])
        # Of replicas on one machine, and on several.
        times.append(goodput.StepTimes(a_c, b_c, a_r, b_r, g))
        times.append(goodput.StepTimes(a_c, b_c, a_n, b_n, g))
    noises = [draw.gamma(2.0, 2.0, [2]) for _ in range(10)]
    for time, noise in itertools.product(times, noises):
        yield goodput.Goodput(time, start, *noise)


class GoodputTest(parameterized.TestCase):
    def test_of_the_first_model_of_adaptdl(self):
        """By the formulas of the paper, written out with its numbers."""
        first = next(models(16))
        a_c, b_c, a_r, b_r, g = first.times
        seconds = ((a_c + b_c * 12) ** g + (a_r + 2 * b_r) ** g) ** (1 / g)
        k = 4 * 12 / 16
        s, g2 = first.variance, first.square
        useful = (s + g2) / (s / k + g2) / k
        np.testing.assert_allclose(
            first.of(4, 12), 4 * 12 / seconds * useful, rtol=1e-12
        )

    def test_rules_of_adaptdl(self):
        replicas, rows = np.meshgrid([1, 2, 4, 8], [8, 12, 16, 20, 24])
        batch = replicas * rows
        for model in models(16):
            useful = goodput.efficiency(batch, 16, *model[2:])
            is_enough = batch >= 16
            self.assertTrue(np.all(useful[is_enough] <= 1.0 + 1e-12))
            order = np.argsort(batch, axis=None)
            self.assertTrue(np.all(np.diff(useful.flat[order]) <= 1e-12))
            speed = batch / model.times.seconds(replicas, rows)
            # More rows: more throughput, with diminishing returns.
            gains = np.diff(speed, axis=0)
            self.assertTrue(np.all(gains >= 0))
            self.assertTrue(np.all(np.diff(gains, axis=0) <= 1e-9))
            # More replicas: less than as many times more.
            each = speed / replicas
            self.assertTrue(np.all(np.diff(each, axis=1) <= 1e-12))

    def test_the_batch_of_adaptdl_where_there_is_no_choice(self):
        for model in models(128):
            for replicas, rows in ROWS_OF_REPLICAS.items():
                self.assertEqual(
                    model.best(replicas, 128), model.of(replicas, rows)
                )

    def test_the_best_batch_is_in_the_bounds(self):
        for model in models(128):
            for replicas in range(1, 20):
                rows = np.arange(-(-128 // replicas), -(-1280 // replicas) + 1)
                found = model.best(replicas, largest=1280)
                every = model.of(replicas, rows)
                self.assertLessEqual(found, np.max(every))
                self.assertGreater(found, 0.99 * np.max(every))
            # Each of 129 replicas would have a row.
            self.assertEqual(model.best(129, largest=128), 0.0)

    @parameterized.parameters(1.0, 2.0, 10.0)
    def test_times_are_found_again(self, overlap):
        times = goodput.StepTimes(0.02, 0.001, 0.05, 0.004, overlap)
        replicas = np.array([1, 1, 2, 2, 3, 4, 6])
        rows = np.array([32, 64, 32, 16, 64, 16, 8])
        found = goodput.fitted_times(
            replicas, rows, times.seconds(replicas, rows)
        )
        np.testing.assert_allclose(
            found.seconds(8, [8, 32, 128]),
            times.seconds(8, [8, 32, 128]),
            rtol=0.02,
        )

    def test_what_was_not_measured_takes_no_time(self):
        # So a second replica is tried: 3 s and 3 s / 2.
        found = goodput.fitted_times([1, 1], [8, 8], [6.0, 6.0])
        np.testing.assert_allclose(
            found.seconds([1, 2], [8, 4]), [6.0, 4.5], rtol=1e-3
        )


if __name__ == "__main__":
    absltest.main()
