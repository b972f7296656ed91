"""Every algorithm and operation: what it gives, its rounds and its bytes."""

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from tests.collectives import numpy_collectives
from tfscale import collectives
from tfscale.collectives.planning import algorithms

SIZES = tuple(range(1, 10))


def most_sent(plan):
    """The largest part of the whole that a device sends."""
    return max(plan.chunks_sent) / plan.num_chunks


class NumbersTest(parameterized.TestCase):
    @parameterized.parameters(*SIZES)
    def test_every_plan_gives_what_its_operation_promises(self, num_devices):
        for plan in numpy_collectives.plans(num_devices):
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
        for make in (collectives.two_shot, algorithms.parameter_server):
            plan = make("all_reduce", num_devices)
            np.testing.assert_array_equal(
                numpy_collectives.play(plan, x), expected
            )


class ClosedFormsTest(parameterized.TestCase):
    """Rounds and bytes, those of a device that sends the most."""

    @parameterized.parameters(*SIZES[1:])
    def test_all_reduce(self, n):
        least = 2 * (n - 1) / n
        expected = {
            "direct": (1, n - 1),
            "two_shot": (2, least),
            # The server alone sends n - 1 times as much as it has.
            "parameter_server": (2, n - 1),
        }
        for name, (rounds, sent) in expected.items():
            plan = getattr(algorithms, name)("all_reduce", n)
            self.assertEqual(plan.num_rounds, rounds, name)
            self.assertAlmostEqual(most_sent(plan), sent, msg=name)

    @parameterized.parameters(*SIZES[1:])
    def test_reduce_scatter_and_all_gather(self, n):
        for operation in ("reduce_scatter", "all_gather"):
            plan = collectives.direct(operation, n)
            self.assertEqual(plan.num_rounds, 1)
            self.assertEqual(set(plan.chunks_sent), {n - 1})
            self.assertEqual(set(plan.chunks_received), {n - 1})

    @parameterized.parameters((2, 2), (2, 4), (4, 2), (3, 3))
    def test_hierarchical(self, machines, size):
        n = machines * size
        least = (machines - 1) / machines / size
        for operation, rounds, sent in (
            ("all_reduce", 4, 2 * least),
            ("reduce_scatter", 2, least),
            ("all_gather", 2, least),
        ):
            plan = collectives.hierarchical(
                operation, n, devices_per_machine=size
            )
            self.assertEqual(plan.num_rounds, rounds)
            between = [0] * n
            for sends in plan.rounds:
                for send in sends:
                    if send.source // size != send.target // size:
                        between[send.source] += 1
            for count in between:
                self.assertAlmostEqual(count / plan.num_chunks, sent)

    def test_a_hierarchical_sum_crosses_once_from_each_machine(self):
        plan = collectives.hierarchical("reduce", 9, devices_per_machine=3)
        between = [
            send
            for sends in plan.rounds
            for send in sends
            if send.source // 3 != send.target // 3
        ]
        self.assertLen(between, 2)


class BadInputTest(parameterized.TestCase):
    @parameterized.parameters(
        (("direct", "sum", 2), {}, "`operation` must be one of reduce"),
        (("direct", "all_reduce", 0), {}, "Received: num_devices=0"),
        (("two_shot", "reduce", 4), {}, "for 'all_reduce' only"),
        (("parameter_server", "all_gather", 4), {}, "for 'all_reduce' only"),
        (
            ("hierarchical", "all_reduce", 6),
            {"devices_per_machine": 4},
            r"Take one of \[1, 2, 3, 6\]",
        ),
    )
    def test_what_cannot_be_is_refused(self, arguments, options, text):
        name, *sizes = arguments
        with self.assertRaisesRegex(ValueError, text):
            getattr(algorithms, name)(*sizes, **options)


if __name__ == "__main__":
    absltest.main()
