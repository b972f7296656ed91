"""Every algorithm and operation: what it gives, its rounds and its bytes."""

import math

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from tests.collectives import numpy_collectives
from tfscale import collectives

SIZES = tuple(range(1, 10))


def most_sent(plan):
    """The largest part of the whole that a device sends."""
    return max(plan.chunks_sent) / plan.num_chunks


class NumbersTest(parameterized.TestCase):
    @parameterized.parameters(*SIZES)
    def test_every_plan_gives_what_its_operation_promises(self, num_devices):
        roots = range(num_devices)
        for plan in numpy_collectives.plans(num_devices, roots):
            x = numpy_collectives.inputs(plan)
            expected = numpy_collectives.expected(plan, x)
            actual = numpy_collectives.play(plan, x)
            for found, wanted in zip(actual, expected, strict=True):
                np.testing.assert_array_equal(found, wanted, str(plan))

    @parameterized.parameters(*SIZES)
    def test_sums_that_are_rounded_are_equal_on_all_devices(self, num_devices):
        for plan in numpy_collectives.plans(num_devices):
            if plan.operation == "all_reduce":
                x = numpy_collectives.inputs(plan, integers=False)
                first, *others = numpy_collectives.play(plan, x)
                for found in others:
                    np.testing.assert_array_equal(found, first, plan.name)

    @parameterized.parameters(*SIZES)
    def test_the_direct_ones_add_up_in_one_order(self, num_devices):
        # So which of the three is chosen for a tensor changes no digit.
        direct = collectives.direct("all_reduce", num_devices)
        x = numpy_collectives.inputs(direct, integers=False)
        expected = numpy_collectives.play(direct, x)
        for make in (collectives.two_shot, collectives.parameter_server):
            plan = make("all_reduce", num_devices)
            np.testing.assert_array_equal(
                numpy_collectives.play(plan, x), expected
            )


class ClosedFormsTest(parameterized.TestCase):
    """Rounds and bytes, those of a device that sends the most."""

    @parameterized.parameters(*SIZES[1:])
    def test_all_reduce(self, n):
        log = math.ceil(math.log2(n))
        is_power = n & (n - 1) == 0
        least = 2 * (n - 1) / n
        expected = {
            "direct": (1, n - 1),
            "two_shot": (2, least),
            # The server alone sends n - 1 times as much as it has.
            "parameter_server": (2, n - 1),
            "ring": (2 * (n - 1), least),
            # Thakur et al. 2005, section 4.5: two more rounds, in which the
            # devices above the power of two give and get all.
            "halving_doubling": (
                (2 * log, least)
                if is_power
                else (
                    2 * (log - 1) + 2,
                    2 * (2 ** (log - 1) - 1) / 2 ** (log - 1) + 1,
                )
            ),
        }
        for name, (rounds, sent) in expected.items():
            plan = getattr(collectives, name)("all_reduce", n)
            self.assertEqual(plan.num_rounds, rounds, name)
            self.assertAlmostEqual(most_sent(plan), sent, msg=name)
        plan = collectives.tree("all_reduce", n)
        self.assertEqual(plan.num_rounds, 2 * log)
        # A reduce and a broadcast, of n - 1 sends each.
        self.assertEqual(sum(plan.chunks_sent), 2 * (n - 1))

    @parameterized.parameters(*SIZES[1:])
    def test_reduce_scatter_and_all_gather(self, n):
        log = math.ceil(math.log2(n))
        for operation in ("reduce_scatter", "all_gather"):
            for name, rounds in (("direct", 1), ("ring", n - 1)):
                plan = getattr(collectives, name)(operation, n)
                self.assertEqual(plan.num_rounds, rounds)
                self.assertEqual(set(plan.chunks_sent), {n - 1})
                self.assertEqual(set(plan.chunks_received), {n - 1})
            plan = collectives.halving_doubling(operation, n)
            if n & (n - 1) == 0:
                self.assertEqual(plan.num_rounds, log)
                self.assertEqual(set(plan.chunks_sent), {n - 1})
            else:
                self.assertEqual(plan.num_rounds, log + 1)
            plan = collectives.tree(operation, n)
            self.assertEqual(plan.num_rounds, 2 * log)

    @parameterized.parameters(*SIZES[1:])
    def test_broadcast_and_reduce(self, n):
        log = math.ceil(math.log2(n))
        for operation in ("broadcast", "reduce"):
            # A chain of n devices and n chunks.
            ring = collectives.ring(operation, n)
            self.assertEqual(ring.num_rounds, (n - 1) + (n - 1))
            self.assertAlmostEqual(most_sent(ring), 1)
            tree = collectives.tree(operation, n)
            self.assertEqual(tree.num_rounds, log)
            self.assertEqual(sum(tree.chunks_sent), n - 1)
            if operation == "broadcast":
                self.assertEqual(tree.chunks_sent[0], log)
            if n & (n - 1) == 0:
                # Scatter and all-gather, or reduce-scatter and gather.
                scattered = collectives.halving_doubling(operation, n)
                self.assertEqual(scattered.num_rounds, 2 * log)
                moved = (
                    scattered.chunks_sent
                    if operation == "broadcast"
                    else scattered.chunks_received
                )
                self.assertEqual(moved[0], 2 * (n - 1))

    @parameterized.parameters(*SIZES[1:])
    def test_gather(self, n):
        log = math.ceil(math.log2(n))
        for name, rounds in (
            ("direct", 1),
            ("ring", n - 1),
            ("tree", log),
            ("halving_doubling", log),
        ):
            plan = getattr(collectives, name)("gather", n)
            self.assertEqual(plan.num_rounds, rounds, name)
            # Everything comes to the root, once.
            self.assertEqual(plan.chunks_received[0], n - 1, name)

    @parameterized.parameters((2, 2), (2, 4), (4, 2), (3, 3))
    def test_hierarchical_all_reduce(self, machines, size):
        n = machines * size
        plan = collectives.hierarchical(
            "all_reduce", n, devices_per_machine=size
        )
        self.assertEqual(plan.num_rounds, 2 * (machines - 1) + 2 * (size - 1))
        between = [0] * n
        for sends in plan.rounds:
            for send in sends:
                if send.source // size != send.target // size:
                    between[send.source] += 1
        for count in between:
            self.assertAlmostEqual(
                count / plan.num_chunks,
                2 * (machines - 1) / machines / size,
            )

    def test_hierarchical_broadcast_crosses_once_to_each_machine(self):
        plan = collectives.hierarchical(
            "broadcast", 9, devices_per_machine=3, root=4
        )
        between = [
            send
            for sends in plan.rounds
            for send in sends
            if send.source // 3 != send.target // 3
        ]
        self.assertLen(between, 2)


class BadInputTest(parameterized.TestCase):
    @parameterized.parameters(
        (("direct", "sum", 2), {}, "`operation` must be one of broadcast"),
        (("ring", "all_reduce", 0), {}, "Received: num_devices=0"),
        (("tree", "reduce", 4), {"root": 4}, "Take one of 0 to 3"),
        (("tree", "all_reduce", 4), {"root": 1}, "Received: root=1 for all_re"),
        (("two_shot", "broadcast", 4), {}, "for 'all_reduce' only"),
        (("parameter_server", "gather", 4), {}, "for 'all_reduce' only"),
        (
            ("hierarchical", "all_reduce", 6),
            {"devices_per_machine": 4},
            r"Take one of \[1, 2, 3, 6\]",
        ),
    )
    def test_what_cannot_be_is_refused(self, arguments, options, text):
        name, *sizes = arguments
        with self.assertRaisesRegex(ValueError, text):
            getattr(collectives, name)(*sizes, **options)


if __name__ == "__main__":
    absltest.main()
