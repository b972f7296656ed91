"""What ZeRO takes of memory, by TensorFlow's own count.

`zero_stage=1` took more than no ZeRO, because a weight was updated by a slice
assigned in place, after which each read of it made a copy, and because slots
were slices that kept the buffer of the whole. Bounds are well above what is
found, since which operations run at once differs, and well below what it was.
They run with --exhaustive: tests of graphs show always that nothing whole is
made.
"""

import pytest
from absl.testing import parameterized

from benchmarks.memory import measure

# Tensors of 4 MiB: the counter misses small ones.
SIZES = {"depth": 6, "width": 1024, "zero_stage": 1}
STAGE_3 = {"zero_stage": 3, "depth": 12}
# Of each layer four times the bytes of its kernel.
ACTIVATIONS = {"depth": 12, "width": 512, "batch": 2048}
# Without ZeRO the weights and slots alone are 6, and the sums 2.
SUMS = {"data": 2, "zero_stage": 2, "accumulate": 4}
OVERWRITTEN = {
    "loss_scale": True,
    "optimizer": {"use_ema": True, "ema_overwrite_frequency": 2},
    "restore": True,
}


class ZeroMemoryTest(parameterized.TestCase):
    # Of all devices, as multiples of the weights: rest, step, evaluate.
    @parameterized.named_parameters(
        ("of_two", {"data": 2}, 4.5, 6.9, 4.9),
        ("of_four", {"data": 4}, 6.6, 11.6, 7.2),
        ("sums_of_two", SUMS, 4.5, 8.5, 4.9),
        ("weights_of_two", {"data": 2, **STAGE_3}, 3.2, 4.5, 3.8),
        ("in_branches", {"data": 2, **OVERWRITTEN}, 5.5, 8.5, 5.9),
    )
    @pytest.mark.crossing
    def test_replicas_stay_below(self, config, rest, step, evaluate):
        bounds = {"rest": rest, "step": step, "evaluate": evaluate}
        tries = []
        for _ in range(3):
            found = measure.measure({**SIZES, **config}, timeout=150)
            tries.append({key: found[key] for key in bounds})
            if all(found[key] <= bounds[key] for key in bounds):
                return
        self.fail(f"Above {bounds} in each of {tries}.")


def pipeline_over_summary(**options):
    found = measure.measure(
        {**ACTIVATIONS, "pipeline": 4, **options}, timeout=280
    )
    # Both are peaks: what is predicted of a step is reached in some.
    return found["largest_step"] / found["predicted"]


def accumulation_over_docs():
    """Predicted: activations of a microbatch, and the sum of all gradients."""
    whole = measure.measure(ACTIVATIONS, timeout=280)
    found = measure.measure({**ACTIVATIONS, "accumulate": 8}, timeout=280)
    activations = (whole["step"] - whole["rest"]) / 8
    return found["step"] / (whole["rest"] + 1.0 + activations)


def sharded_gpt_over_whole():
    """Tied embeddings: the largest weight is the first and the last."""
    whole = measure.measure({**measure.GPT, "data": 4}, timeout=280)
    found = measure.measure(
        {**measure.GPT, "data": 4, "zero_stage": 3}, timeout=280
    )
    return found["step"] / whole["step"]


class PredictedMemoryTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("a_pipeline", pipeline_over_summary, 0.9, 1.1),
        (
            "a_pipeline_that_recomputes",
            lambda: pipeline_over_summary(recompute=True),
            *(0.9, 1.1),
        ),
        ("accumulation", accumulation_over_docs, 0.9, 1.1),
        ("gpt_in_shards", sharded_gpt_over_whole, 0.0, 0.45),
    )
    @pytest.mark.crossing
    def test_the_peak_is_as_predicted_of(self, measure, least, most):
        self.assertBetween(measure(), least, most)
