"""Published tables of Megatron-LM, and its GPT as a table of layers.

Tables 1 and 2: Narayanan et al. 2021, "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM". Table 5 and figure 1: Korthikanti
et al. 2022, "Reducing Activation Recomputation in Large Transformer Models";
Calculon (github.com/calculon-ai/calculon) validates on the same literals.
"""

import dataclasses

from tfscale.planner.cost import Predictor
from tfscale.planner.cost import Settings
from tfscale.planner.device import DEVICES
from tfscale.planner.layers import Layer
from tfscale.planner.layers import ModelTable
from tfscale.planner.layers import Work

A100 = DEVICES["A100"]


@dataclasses.dataclass(frozen=True)
class Gpt:
    """A GPT of Megatron-LM, in 16 bits: figures of one block and one row."""

    hidden: int
    num_layers: int
    heads: int
    length: int = 2048
    vocabulary: int = 51200

    def flops(self, batch):
        """Of a step with recomputation, equation 3 of Narayanan et al."""
        h, s = self.hidden, self.length
        blocks = 96 * self.num_layers * s * h * h * (1 + s / (6 * h))
        return batch * (blocks + 6 * s * h * self.vocabulary)

    def table(self, ranks, selective=False):
        """Its layers on so many model ranks: a `Layer` for each block.

        Bytes are those of Korthikanti et al., table 2. With `selective`
        recomputation attention scores are computed again, and not kept.
        """
        h, s, t = self.hidden, self.length, ranks
        dense = 24 * s * h * h / t
        attention = 4 * s * s * h / t
        scores = 5 * self.heads * s * s / t
        undivided, divided = 10 * s * h, 24 * s * h / t
        forward = Work(
            dense + attention,
            products=3,
            moved=undivided + divided + scores,
            undivided=undivided,
            summed=4 * s * h,
            sums=2,
        )
        backward = forward._replace(flops=2 * forward.flops, products=6)
        if selective:
            backward = backward._replace(
                flops=backward.flops + attention,
                moved=backward.moved + scores,
            )
        block = Layer(
            "block",
            forward,
            backward,
            trainable=12 * h * h / t,
            kept=undivided + divided + (0 if selective else scores),
            undivided=undivided,
            # Each rank sends its part, and gathers behind (section 4.1).
            cut_bytes=2 * s * h / t,
        )
        logits = 2 * s * h * self.vocabulary / t
        head = Layer(
            "head", Work(logits, products=1), Work(2 * logits, products=2)
        )
        return ModelTable(
            "gpt",
            {t: (block,) * self.num_layers + (head,)},
            flops=self.flops(1) / 4,
            num_weights=0,
            is_half=True,
        )


def even_cuts(layers, num_stages, speeds=None):
    """Blocks in equal parts, and the head in the last one."""
    size = (len(layers) - 1) // num_stages
    return tuple(range(size, size * num_stages, size))


def predict(gpt, settings, rows, device=A100, *, selective=False):
    """Of a step of microbatches of so many rows."""
    batch = settings.data * settings.num_microbatches * rows
    predictor = Predictor(
        gpt.table(settings.model, selective), batch, device, even_cuts
    )
    return predictor.predict(settings)


def tflops(gpt, settings, rows, device=A100):
    """TFLOP/s of each device, as the papers count them."""
    found = predict(gpt, settings, rows, device)
    batch = settings.data * settings.num_microbatches * rows
    flops = gpt.flops(batch) / settings.num_devices
    return flops / found.step_seconds / 1e12


def _settings(devices, t, p, batch, rows, chunks=1):
    data = devices // (t * p)
    return Settings(
        data,
        p,
        t,
        batch // (data * rows),
        "interleaved" if chunks > 1 else "1f1b",
        chunks,
        recompute=True,
    )


GPT_175B = Gpt(12288, 96, 96)
GPT_530B = Gpt(20480, 105, 128)
# Gpt(hidden, layers, heads), settings, rows of a microbatch, published TFLOP/s
# of a device. Table 1 says neither rows nor chunks: they are those that the
# planner finds best among the ones that fit.
TABLE_1 = [
    (Gpt(2304, 24, 24), _settings(32, 1, 1, 512, 16), 16, 137),
    (Gpt(3072, 30, 32), _settings(64, 2, 1, 512, 16), 16, 138),
    (Gpt(4096, 36, 32), _settings(128, 4, 1, 512, 16), 16, 142),
    (Gpt(6144, 40, 48), _settings(256, 8, 1, 1024, 16), 16, 135),
    (Gpt(8192, 48, 64), _settings(512, 8, 2, 1536, 8, 6), 8, 138),
    (Gpt(10240, 60, 80), _settings(1024, 8, 4, 1792, 2, 5), 2, 140),
    (Gpt(12288, 80, 96), _settings(1536, 8, 8, 2304, 2, 5), 2, 148),
    (Gpt(16384, 96, 128), _settings(1920, 8, 16, 2160, 1, 6), 1, 155),
    (Gpt(20480, 105, 128), _settings(2520, 8, 35, 2520, 1, 3), 1, 163),
    (Gpt(25600, 128, 160), _settings(3072, 8, 64, 3072, 1, 2), 1, 163),
]
TABLE_2 = [
    (GPT_175B, _settings(384, 8, 12, 1536, 1, 4), 1, 153),
    (GPT_175B, _settings(768, 8, 12, 1536, 1, 4), 1, 149),
    (GPT_175B, _settings(1536, 8, 12, 1536, 1, 4), 1, 141),
    (GPT_530B, _settings(560, 8, 35, 2240, 1, 3), 1, 171),
    (GPT_530B, _settings(1120, 8, 35, 2240, 1, 3), 1, 167),
    (GPT_530B, _settings(2240, 8, 35, 2240, 1, 3), 1, 159),
]
# Settings, rows of a microbatch, seconds with full recomputation, and with
# selective one and sequence parallelism; GiB of activations of figure 1
# without recomputation, and with the second.
TABLE_5 = [
    (Gpt(6144, 48, 64), _settings(8, 8, 1, 4, 4), 4, 1.42, 1.10, 59.25, 9.56),
    (GPT_175B, _settings(64, 8, 8, 64, 1, 3), 1, 18.13, 13.75, 66.84, 12.35),
    (
        *(GPT_530B, _settings(280, 8, 35, 280, 1, 3), 1),
        *(49.05, 37.83, 114.02, 23.08),
    ),
    (
        *(Gpt(25600, 128, 160), _settings(512, 8, 64, 512, 1), 1),
        *(94.42, 71.49, 131.25, 26.56),
    ),
]
