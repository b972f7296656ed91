import types

import numpy as np
from absl.testing import absltest

from tfscale.planner.device import DEVICES
from tfscale.throughput.hindrances import hindrance


def _model(data, weights, zero_stage=0):
    """A model as far as predictions read it."""
    mesh = types.SimpleNamespace(
        axis_names=["data", "pipeline", "model"], shape=(data, 1, 1)
    )
    return types.SimpleNamespace(
        distribute_strategy=types.SimpleNamespace(
            mesh=mesh,
            extended=types.SimpleNamespace(
                config=types.SimpleNamespace(zero_stage=zero_stage)
            ),
        ),
        trainable_variables=[np.zeros(weights, "int8")],
    )


class HindrancesTest(absltest.TestCase):
    def test_a_wait_for_input_is_clear_above_a_tenth(self):
        self.assertIsNone(hindrance(_model(1, 1), 0.1, 1.0, None))
        self.assertIsNone(hindrance(_model(1, 1), None, 1.0, None))
        found = hindrance(_model(1, 1), 0.11, 1.0, None)
        self.assertEqual((found.cause, found.share), ("input", 0.11))
        self.assertIn("11%", found.sentence)

    def test_gradients_of_replicas_take_what_links_predict(self):
        # 2 (8 - 1) / 8 times 4 MB over 0.9 of 300 GB/s: 26 us, and a latency.
        device, model = DEVICES["A100"], _model(8, 10**6)
        expected = 1.75 * 4e6 / (0.9 * 300e9) + device.latency
        found = hindrance(model, 0.2, 2 * expected, device)
        self.assertEqual(found.cause, "replicas")
        self.assertAlmostEqual(found.share, 0.5)
        self.assertEqual(
            hindrance(model, 0.2, 20 * expected, device).cause, "input"
        )
        self.assertIsNone(hindrance(model, None, 20 * expected, device))
        # Weights are gathered in the forward and in the backward.
        fully_sharded = _model(8, 10**6, zero_stage=3)
        more = hindrance(fully_sharded, 0.2, 2 * expected, device).share
        sending = 1.5 * (expected - device.latency) + device.latency
        self.assertAlmostEqual(more, sending / (2 * expected))
        self.assertIsNone(hindrance(_model(1, 10**6), None, 1e-9, device))


if __name__ == "__main__":
    absltest.main()
