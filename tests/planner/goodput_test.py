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
    times = [goodput.StepTimes(*draw.gamma(2.0, 2.0, [7])) for _ in range(10)]
    noises = [draw.gamma(2.0, 2.0, [2]) for _ in range(10)]
    for time, noise in itertools.product(times, noises):
        yield goodput.Goodput(time, start, *noise)


class GoodputTest(parameterized.TestCase):
    def test_of_the_first_model_of_adaptdl(self):
        """By the formulas of the paper, written out with its numbers."""
        first = next(models(16))
        a_c, b_c, a_n, b_n, a_r, b_r, g = first.times
        computing = a_c + b_c * 12
        for machines, sending in ((1, a_r + 2 * b_r), (2, a_n + 2 * b_n)):
            seconds = (computing**g + sending**g) ** (1 / g) + 2 * computing
            k = 4 * 12 * 3 / 16
            s, g2 = first.variance, first.square
            useful = (s + g2) / (s / k + g2) / k
            np.testing.assert_allclose(
                first.of(machines, 4, 12, accumulated=2),
                4 * 12 * 3 / seconds * useful,
                rtol=1e-12,
            )

    def test_rules_of_adaptdl(self):
        replicas, rows = np.meshgrid([1, 2, 4, 8], [8, 12, 16, 20, 24])
        for model in models(16):
            for machines, accumulated in itertools.product((1, 2), range(5)):
                batch = replicas * rows * (accumulated + 1)
                useful = goodput.efficiency(batch, 16, *model[2:])
                is_enough = batch >= 16
                self.assertTrue(np.all(useful[is_enough] <= 1.0 + 1e-12))
                order = np.argsort(batch, axis=None)
                self.assertTrue(np.all(np.diff(useful.flat[order]) <= 1e-12))
                seconds = model.times.seconds(
                    machines, replicas, rows, accumulated
                )
                speed = batch / seconds
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
                for machines in (1, replicas):
                    self.assertEqual(model.best(machines, replicas)[1], rows)

    def test_the_bounds_of_adaptdl(self):
        for model in models(128):
            self.assertEqual(model.best(1, 1, rows=(64, 256))[1], 128)
            found, rows = model.best(4, 4, largest=1024, rows=(128, 128))
            self.assertGreater(found, 0.0)
            self.assertEqual(rows, 128)
            for replicas in range(1, 20):
                found, rows = model.best(
                    1, replicas, largest=1280, rows=(64, 256)
                )
                self.assertBetween(rows, max(64, -(-128 // replicas)), 256)
                self.assertLessEqual(rows * replicas, 1280 + replicas)
            # 64 rows of each of 21 replicas are more than 1280.
            self.assertEqual(
                model.best(1, 21, largest=1280, rows=(64, 256))[0], 0.0
            )

    @parameterized.parameters(1.0, 2.0, 10.0)
    def test_times_are_found_again(self, overlap):
        times = goodput.StepTimes(0.02, 0.001, 1, 1, 0.05, 0.004, overlap)
        replicas = np.array([1, 1, 2, 2, 3, 4, 6])
        rows = np.array([32, 64, 32, 16, 64, 16, 8])
        found = goodput.fitted_times(
            replicas, rows, times.seconds(1, replicas, rows)
        )
        np.testing.assert_allclose(
            found.seconds(1, 8, [8, 32, 128]),
            times.seconds(1, 8, [8, 32, 128]),
            rtol=0.02,
        )

    def test_what_was_not_measured_takes_no_time(self):
        # So a second replica is tried: 3 s and 3 s / 2.
        found = goodput.fitted_times([1, 1], [8, 8], [6.0, 6.0])
        np.testing.assert_allclose(
            found.seconds(1, [1, 2], [8, 4]), [6.0, 4.5], rtol=1e-3
        )


if __name__ == "__main__":
    absltest.main()
