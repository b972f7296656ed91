"""The simulator against closed forms of the literature."""

import math
import os
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tests.collectives import numpy_collectives
from tfscale import collectives
from tfscale.collectives import Costs
from tfscale.collectives import simulate
from tfscale.collectives.planning import algorithms
from tfscale.collectives.planning import choosing

BYTES = 840e6  # divisible by 2 to 8
LATENCY, BANDWIDTH = 3e-3, 1e9
COSTS = Costs(LATENCY, BANDWIDTH)
WHOLE = BYTES / BANDWIDTH


def makespan(name, operation, num_devices, costs=COSTS, num_bytes=BYTES):
    make = getattr(algorithms, name, numpy_collectives.ring)
    plan = make(operation, num_devices)
    return simulate(plan, num_bytes, costs).makespan


def cores(count):
    """Within it, the process may use so many cores."""
    return mock.patch.object(choosing, "_usable_cores", lambda: count)


class ClosedFormsTest(parameterized.TestCase):
    @parameterized.parameters(*range(1, 10))
    def test_for_any_number_of_devices(self, n):
        a, t, part = LATENCY, WHOLE, (n - 1) / n
        expected = {
            ("direct", "all_reduce"): a + (n - 1) * t,
            ("parameter_server", "all_reduce"): 2 * (a + (n - 1) * t),
            ("two_shot", "all_reduce"): 2 * (a + part * t),
            ("ring", "all_reduce"): 2 * (n - 1) * (a + t / n),
            ("ring", "reduce_scatter"): (n - 1) * (a + t / n),
            ("ring", "all_gather"): (n - 1) * (a + t / n),
            ("direct", "reduce"): a + (n - 1) * t,
            ("direct", "reduce_scatter"): a + part * t,
            ("direct", "all_gather"): a + part * t,
        }
        for (name, operation), time in expected.items():
            if n == 1:
                time = 0
            self.assertAlmostEqual(
                makespan(name, operation, n), time, msg=f"{name} {operation}"
            )

    @parameterized.parameters(*range(2, 10))
    def test_no_all_reduce_is_faster_than_the_bound(self, n):
        for name in ("direct", "two_shot", "parameter_server", "ring"):
            time = makespan(name, "all_reduce", n, Costs(0, BANDWIDTH))
            bound = 2 * (n - 1) / n * WHOLE
            if name == "direct":
                bound = min(bound, WHOLE)
            self.assertGreaterEqual(time, bound * (1 - 1e-9), name)

    def test_latency_lets_a_server_win_where_there_are_many_workers(self):
        # t_ar > t_ps where a B / S > (N - 1)^2 / (N (N - 2)), which falls to 1.
        costs = Costs(latency=1.1 * WHOLE, bandwidth=BANDWIDTH)
        winners = [
            "ring"
            if makespan("ring", "all_reduce", n, costs)
            < makespan("parameter_server", "all_reduce", n, costs)
            else "server"
            for n in range(2, 9)
        ]
        self.assertEqual(winners, ["ring"] * 3 + ["server"] * 4)


class CostsTest(absltest.TestCase):
    def test_bytes_are_those_of_the_plan(self):
        for plan in (
            numpy_collectives.ring("all_reduce", 5),
            collectives.hierarchical("all_reduce", 8, devices_per_machine=4),
        ):
            simulation = simulate(plan, BYTES, COSTS)
            for bytes_, chunks in (
                (simulation.bytes_sent, plan.chunks_sent),
                (simulation.bytes_received, plan.chunks_received),
            ):
                for found, count in zip(bytes_, chunks, strict=True):
                    self.assertAlmostEqual(
                        found, count * BYTES / plan.num_chunks
                    )

    def test_links_of_their_own_make_the_hierarchical_one_faster(self):
        def bandwidth(source, target):
            return 100e9 if source // 4 == target // 4 else 1e9

        costs = Costs(LATENCY, bandwidth)
        flat = simulate(collectives.two_shot("all_reduce", 8), BYTES, costs)
        levels = simulate(
            collectives.hierarchical("all_reduce", 8, devices_per_machine=4),
            BYTES,
            costs,
        )
        # 2 (m - 1) / m S / g over the slow wire, where two shots send
        # 2 (m - 1) / m S.
        self.assertGreater(flat.makespan, 2 * 4 / 8 * WHOLE)
        self.assertAlmostEqual(
            levels.makespan,
            2 * (LATENCY + WHOLE / 8) + 2 * (LATENCY + 3 * BYTES / 4 / 100e9),
        )

    def test_memory_is_read_and_written(self):
        costs = Costs(0, math.inf, memory_bandwidth=1e9)
        # Of 4 devices each reads 4 tensors and writes one.
        self.assertAlmostEqual(
            makespan("direct", "all_reduce", 4, costs), 5 * BYTES / 1e9
        )
        # A quarter of that, then the whole is put together.
        self.assertAlmostEqual(
            makespan("two_shot", "all_reduce", 4, costs),
            (5 / 4 + 2) * BYTES / 1e9,
        )

    def test_what_cannot_be_is_refused(self):
        plan = collectives.direct("all_reduce", 4)
        for make, text in (
            (lambda: Costs(-1, 1), "`latency` must not be negative"),
            (lambda: Costs(0, 0), "`bandwidth` must be above 0"),
            (lambda: Costs(0, 1, memory_bandwidth=-1), "`memory_bandwidth`"),
            (lambda: Costs(0, 1, overhead=-1), "`overhead` must not be neg"),
            (lambda: Costs(0, 1, num_cores=0), "`num_cores` must be at least"),
            (lambda: simulate(plan, -1, COSTS), "num_bytes=-1"),
        ):
            with self.assertRaisesRegex(ValueError, text):
                make()


class SharedCoresTest(absltest.TestCase):
    """Devices of one process, whose work so many cores do for all of them."""

    def test_work_counts_for_all_devices(self):
        def time(name, num_devices, num_cores):
            costs = Costs(
                0, math.inf, memory_bandwidth=1e9, num_cores=num_cores
            )
            return makespan(name, "all_reduce", num_devices, costs) * 1e9

        # 4 devices read 4 tensors and write one each, or one does for all.
        for cores, each in ((1, 4), (2, 2), (4, 1), (9, 1)):
            self.assertAlmostEqual(time("direct", 4, cores), each * 5 * BYTES)
        for cores in (1, 2, 4):
            self.assertAlmostEqual(
                time("parameter_server", 4, cores), 5 * BYTES
            )
        # Each adds up a quarter, and puts the whole together.
        for cores, each in ((1, 4), (2, 2), (4, 1)):
            self.assertAlmostEqual(
                time("two_shot", 4, cores), each * (5 / 4 + 2) * BYTES
            )
        # 3 on 2 cores: one of these works twice.
        self.assertAlmostEqual(time("direct", 3, 2), 2 * 4 * BYTES)

    def test_every_operation_keeps_a_core_busy(self):
        costs = Costs(0, math.inf, overhead=1.0, num_cores=1)
        for name, num_devices, operations in (
            # Messages and sums.
            ("direct", 4, 12 + 4),
            ("parameter_server", 4, 6 + 1),
            # Each cuts and puts together too.
            ("two_shot", 4, 4 + 12 + 4 + 12 + 4),
            ("ring", 4, 4 + 12 + 12 + 12 + 4),
        ):
            self.assertEqual(
                makespan(name, "all_reduce", num_devices, costs), operations
            )
        # A device that has a core of its own: the server's 3 messages, then
        # the sum, then a message at each of the others.
        costs = Costs(0, math.inf, overhead=1.0)
        self.assertEqual(
            makespan("parameter_server", "all_reduce", 4, costs), 3 + 1 + 1
        )


class ChooseTest(parameterized.TestCase):
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
            plan = collectives.choose("all_reduce", num_devices, num_bytes)
        self.assertEqual(plan.name, name)

    def test_two_devices_add_up_for_themselves(self):
        for num_cores in (2, 3, 16):
            with cores(num_cores):
                for exponent in range(31):
                    plan = collectives.choose("all_reduce", 2, 1 << exponent)
                    self.assertEqual(plan.name, "direct")

    @parameterized.product(n=[*range(1, 10)], num_cores=[1, 2, 4, 16])
    def test_in_one_process_no_other_order_of_sums_is_chosen(
        self, n, num_cores
    ):
        with cores(num_cores):
            for exponent in range(0, 31, 5):
                plan = collectives.choose("all_reduce", n, 1 << exponent)
                self.assertIn(
                    plan.name, ("direct", "two_shot", "parameter_server")
                )
                for operation in ("all_gather", "reduce_scatter"):
                    plan = collectives.choose(operation, n, 1 << exponent)
                    self.assertEqual(plan.name, "direct")

    def test_cores_are_those_that_the_process_may_use(self):
        usable = os.sched_getaffinity(0)
        self.assertEqual(choosing.in_process().num_cores, len(usable))
        os.sched_setaffinity(0, [min(usable)])
        try:
            self.assertEqual(choosing.in_process().num_cores, 1)
        finally:
            os.sched_setaffinity(0, usable)

    def test_the_fastest_is_chosen(self):
        for num_bytes in (1e3, 1e6, 1e9):
            chosen = collectives.choose("all_reduce", 6, num_bytes, costs=COSTS)
            times = [
                makespan(name, "all_reduce", 6, COSTS, num_bytes)
                for name in ("direct", "two_shot", "parameter_server", "ring")
            ]
            time = simulate(chosen, num_bytes, COSTS).makespan
            self.assertLessEqual(time, min(times))


if __name__ == "__main__":
    absltest.main()
