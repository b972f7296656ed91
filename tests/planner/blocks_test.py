import dataclasses

from absl.testing import absltest

from tfscale.planner import blocks
from tfscale.planner.cost import Predictor
from tfscale.planner.cost import Settings
from tfscale.planner.device import DEVICES
from tfscale.planner.layers import ModelTable

FLOPS, BANDWIDTH, WEIGHT_PASSES = 5e10, 8e9, 3.5


class BlocksTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.layers = blocks.make_blocks(64).layers

    def fit(self, few, many):
        return blocks.fit(
            self.layers, (few, many), FLOPS, BANDWIDTH, WEIGHT_PASSES
        )

    def test_the_planner_predicts_what_was_measured(self):
        few, many = 2e-3, 16e-3
        device = dataclasses.replace(
            DEVICES["A100"],
            float32_flops=FLOPS,
            memory_bandwidth=BANDWIDTH,
            efficiency=1.0,
            weight_passes=WEIGHT_PASSES,
            **self.fit(few, many)._asdict(),
        )
        table = ModelTable("blocks", {1: tuple(self.layers)}, flops=1.0)
        for rows, measured in ((blocks.FEW, few), (blocks.MANY, many)):
            predictor = Predictor(table, rows, device)
            found = predictor.predict(Settings()).seconds["compute"]
            self.assertAlmostEqual(found / measured, 1)

    def test_a_fast_measurement_is_no_negative_cost(self):
        # Other programs ran while products were measured.
        found = self.fit(1e-9, 2e-9)
        self.assertEqual((found.passes, found.startup), (1.0, 0.0))


if __name__ == "__main__":
    absltest.main()
