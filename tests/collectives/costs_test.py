"""Which all-reduce is chosen, against closed forms of the literature."""

import math
import os
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tfscale.collectives import costs
from tfscale.collectives.costs import Costs

BYTES = 840e6  # divisible by 2 to 8
LATENCY, BANDWIDTH = 3e-3, 1e9
WHOLE = BYTES / BANDWIDTH


def cores(count):
    """Within it, the process may use so many cores."""
    return mock.patch.object(costs, "_usable_cores", lambda: count)


class SecondsTest(parameterized.TestCase):
    @parameterized.parameters(*range(2, 10))
    def test_over_links(self, n):
        found = costs.seconds(Costs(LATENCY, BANDWIDTH, math.inf), n, BYTES)
        expected = {
            "direct": LATENCY + (n - 1) * WHOLE,
            "two_shot": 2 * (LATENCY + (n - 1) / n * WHOLE),
            "parameter_server": 2 * (LATENCY + (n - 1) * WHOLE),
        }
        for name, seconds in expected.items():
            self.assertAlmostEqual(found[name], seconds, msg=name)

    @parameterized.parameters(
        # 4 devices read 4 tensors and write one each, or one does for all. Each
        # adds up a quarter, and puts the whole together. 3 devices on 2 cores:
        # one of these works twice.
        (4, 1, 4 * 5, 4 * (5 / 4 + 2), 5),
        (4, 2, 2 * 5, 2 * (5 / 4 + 2), 5),
        (4, 4, 5, 5 / 4 + 2, 5),
        (4, 9, 5, 5 / 4 + 2, 5),
        (4, None, 5, 5 / 4 + 2, 5),
        (3, 2, 2 * 4, 2 * (4 / 3 + 2), 4),
    )
    def test_memory_is_read_and_written(self, n, num_cores, *expected):
        memory = Costs(0.0, math.inf, 1e9, num_cores=num_cores)
        found = costs.seconds(memory, n, 1e9).values()
        for seconds, wanted in zip(found, expected, strict=True):
            self.assertAlmostEqual(seconds, wanted)

    def test_every_operation_keeps_a_core_busy(self):
        busy = Costs(0.0, math.inf, math.inf, overhead=1.0, num_cores=1)
        self.assertEqual(
            costs.seconds(busy, 4, BYTES),
            {
                # Messages and sums.
                "direct": 12 + 4,
                "parameter_server": 6 + 1,
                # Each cuts and puts together too.
                "two_shot": 4 + 12 + 4 + 12 + 4,
            },
        )


class FastestTest(parameterized.TestCase):
    @parameterized.parameters(
        # A core for each device, which read and write at the same time.
        (2, 2, 64 << 20, "direct"),
        (4, 4, 64 << 20, "two_shot"),
        (8, 8, 64 << 20, "two_shot"),
        (4, 4, 256 << 10, "direct"),
        (8, 8, 1 << 10, "parameter_server"),
        # Fewer cores than devices: what is done once for all is fastest.
        (4, 2, 64 << 20, "parameter_server"),
        (8, 2, 64 << 20, "parameter_server"),
        (8, 2, 1 << 10, "parameter_server"),
    )
    def test_in_one_process(self, num_devices, num_cores, num_bytes, name):
        with cores(num_cores):
            found = costs.fastest(costs.in_process(), num_devices, num_bytes)
        self.assertEqual(found, name)

    def test_two_devices_add_up_for_themselves(self):
        for num_cores in (2, 3, 16):
            with cores(num_cores):
                for exponent in range(31):
                    found = costs.fastest(costs.in_process(), 2, 1 << exponent)
                    self.assertEqual(found, "direct")

    def test_cores_are_those_that_the_process_may_use(self):
        usable = os.sched_getaffinity(0)
        self.assertEqual(costs.in_process().num_cores, len(usable))
        os.sched_setaffinity(0, [min(usable)])
        try:
            self.assertEqual(costs.in_process().num_cores, 1)
        finally:
            os.sched_setaffinity(0, usable)


if __name__ == "__main__":
    absltest.main()
