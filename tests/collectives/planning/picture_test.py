"""Drawings of plans, to the letter."""

from absl.testing import absltest

from tests.collectives import numpy_collectives
from tfscale import collectives


class AsTextTest(absltest.TestCase):
    def test_a_ring(self):
        plan = numpy_collectives.ring("all_reduce", 3)
        self.assertEqual(
            collectives.as_text(plan).splitlines(),
            [
                "ring all_reduce: 3 devices, 3 chunks, 4 rounds",
                "  device 0  2+1  2+0  2:2  2:1",
                "  device 1  0+2  0+1  0:0  0:2",
                "  device 2  1+0  1+2  1:1  1:0",
            ],
        )

    def test_a_sum_for_one_device_of_two_machines(self):
        plan = collectives.hierarchical("reduce", 4, devices_per_machine=2)
        self.assertEqual(
            collectives.as_text(plan).splitlines(),
            [
                "hierarchical reduce: 4 devices, 1 chunk, 2 rounds",
                "  device 0  1+0  2+0",
                "  device 1",
                "  device 2  3+0",
                "  device 3",
            ],
        )

    def test_one_device(self):
        plan = numpy_collectives.ring("all_reduce", 1)
        self.assertEqual(
            collectives.as_text(plan).splitlines(),
            ["ring all_reduce: 1 device, 1 chunk, 0 rounds", "  device 0"],
        )


if __name__ == "__main__":
    absltest.main()
