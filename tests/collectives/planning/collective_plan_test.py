"""Plans that are wrong are refused, and the message says where."""

import itertools

from absl.testing import absltest
from absl.testing import parameterized

from tests.collectives import numpy_collectives
from tfscale import collectives
from tfscale.collectives.planning.collective_plan import CollectivePlan
from tfscale.collectives.planning.contents import OPERATIONS
from tfscale.collectives.planning.send import Send


def custom(operation, rounds, num_devices=3, num_chunks=None, **options):
    if num_chunks is None:
        num_chunks = num_devices
    return CollectivePlan(operation, num_devices, num_chunks, rounds, **options)


class WrongPlansTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (
            "lost",
            custom,
            ("all_gather", [["0>1:0", "1>2:1", "2>0:2"], ["0>1:2", "1>2:0"]]),
            "device 0 ends with chunk 1 without the value of device 1",
        ),
        (
            "lost_by_overwriting",
            custom,
            ("reduce", [["1>0+0"], ["2>0:0"]], 3, 1),
            "overwrites a sum with the value of device 0",
        ),
        (
            "never_added",
            custom,
            ("reduce", [["1>0+0"]], 3, 1),
            "device 0 ends with chunk 0 without the value of device 2",
        ),
        (
            "added_twice",
            custom,
            ("reduce", [["1>0+0"], ["1>2+0"], ["2>0+0"]], 3, 1),
            "2>0.0 in round 2 adds the value of device 1 to a sum",
        ),
        (
            "added_twice_in_one_round",
            custom,
            ("reduce", [["1>2+0"], ["1>0+0", "2>0+0"]], 3, 1),
            "adds the value of device 1, which another send of the round",
        ),
        (
            "sent_twice",
            custom,
            ("all_gather", [["0>1:0"], ["0>2:0", "0>1:0"]]),
            "0>1:0 in round 1, where device 1 has chunk 0 already",
        ),
        (
            "stored_twice_in_one_round",
            custom,
            ("all_gather", [["0>1:0"], ["0>2:0", "1>2:0"]]),
            "in round 1 device 2 gets chunk 0 in 2 ways",
        ),
        (
            "waits_for_a_later_round",
            custom,
            ("all_gather", [["1>2:0"], ["0>1:0"]]),
            "in round 0 1>2:0 waits for 0>1:0 of round 1",
        ),
        (
            "wait_for_each_other",
            custom,
            ("all_gather", [["1>2:0", "2>1:0"]]),
            "1>2:0 waits for 2>1:0 of round 0; 2>1:0 waits for 1>2:0",
        ),
        (
            "waits_for_nothing",
            custom,
            ("all_gather", [["1>0:2"]]),
            "waits for chunk 2, which nobody sends to device 1",
        ),
        (
            "adds_in_a_gather",
            custom,
            ("all_gather", [["1>0+1"]]),
            "Write 1>0:1 to store",
        ),
        (
            "no_such_device",
            custom,
            ("all_gather", [["3>0:1"]]),
            "3>0:1 in round 0, of 3 devices and 3 chunks",
        ),
        ("to_itself", custom, ("all_gather", [["1>1:1"]]), "1>1:1 in round 0"),
        ("empty_round", custom, ("all_gather", [[]]), "round 0 of 1 is empty"),
        ("no_number", custom, ("all_gather", [["1-0:1"]]), "Received: '1-0:1'"),
        (
            "too_few_chunks",
            custom,
            ("all_gather", [], 3, 2),
            "num_chunks=2 for 3 devices",
        ),
        ("no_chunks", custom, ("all_reduce", [], 3, 0), "num_chunks=0"),
    )
    def test_is_refused(self, make, arguments, text):
        with self.assertRaisesRegex(ValueError, text):
            make(*arguments)

    def test_sums_in_different_orders_are_refused(self):
        # (0 + 1) + 2 on device 0, 1 + (0 + 2) on device 2.
        with self.assertRaisesRegex(ValueError, "in the same order"):
            custom(
                "all_reduce",
                [["1>0+0", "2>0+0", "0>2+0"], ["1>2+0", "0>1:0"]],
                3,
                1,
            )

    @parameterized.product(
        name=["ring", "direct", "hierarchical"],
        operation=OPERATIONS,
        num_devices=[4, 6],
    )
    def test_any_send_that_is_left_out_or_doubled_is_noticed(
        self, name, operation, num_devices
    ):
        if name == "hierarchical":
            plan = collectives.hierarchical(
                operation, num_devices, devices_per_machine=2
            )
        elif name == "direct":
            plan = collectives.direct(operation, num_devices)
        elif operation == "reduce":
            return  # no ring
        else:
            plan = numpy_collectives.ring(operation, num_devices)
        for number, sends in enumerate(plan.rounds):
            for index in range(len(sends)):
                for kept in (
                    sends[:index] + sends[index + 1 :],
                    (*sends, sends[index]),
                ):
                    rounds = list(plan.rounds)
                    rounds[number : number + 1] = [kept] if kept else []
                    with self.assertRaises(ValueError):
                        custom(operation, rounds, num_devices, plan.num_chunks)

    def test_rounds_of_a_ring_in_any_other_order_are_noticed(self):
        plan = numpy_collectives.ring("all_gather", 4)
        for rounds in itertools.permutations(plan.rounds):
            if rounds != plan.rounds:
                with self.assertRaisesRegex(ValueError, "wait for ever"):
                    custom("all_gather", rounds, 4)


class TextTest(absltest.TestCase):
    def test_sends_are_read_as_they_are_printed(self):
        for sends in numpy_collectives.ring("all_reduce", 12).rounds:
            for send in sends:
                self.assertEqual(Send.parse(str(send)), send)

    def test_a_plan_of_strings_is_that_of_sends(self):
        plan = collectives.hierarchical("all_reduce", 6, devices_per_machine=2)
        rounds = [[str(send) for send in sends] for sends in plan.rounds]
        again = custom("all_reduce", rounds, 6, plan.num_chunks, name=plan.name)
        self.assertEqual(again, plan)


if __name__ == "__main__":
    absltest.main()
