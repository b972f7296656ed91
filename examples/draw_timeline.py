"""Draws what a training step of a pipeline should take, and what it took.

    python -m examples.draw_timeline --flagfile=configs/draw_timeline.flags

A GPT in stages is timed layer by layer, the schedule is simulated with these
times, and a step is then measured; both are drawn at one scale.
"""

import keras
import numpy as np
from absl import app
from absl import flags

import tfscale
from examples import gpt
from examples import meshes

OUTPUT = flags.DEFINE_string("output", "timeline.png", "The PNG to write.")
NUM_STAGES = flags.DEFINE_integer(
    "num_stages", 2, "Pipeline stages.", lower_bound=1
)
NUM_MICROBATCHES = flags.DEFINE_integer(
    "num_microbatches", 8, "Microbatches of a step.", lower_bound=1
)
SCHEDULE = flags.DEFINE_enum(
    "schedule",
    "1f1b",
    meshes.SCHEDULES,
    "Order of the microbatches.",
)
NUM_BLOCKS = flags.DEFINE_integer(
    "num_blocks", 8, "Number of transformer blocks.", lower_bound=1
)
WIDTH = flags.DEFINE_integer(
    "width", 256, "Features of a token.", lower_bound=16
)
LENGTH = flags.DEFINE_integer(
    "sequence_length", 128, "Tokens of a row.", lower_bound=1
)
ROWS = flags.DEFINE_integer("batch_size", 32, "Rows of a step.", lower_bound=1)


def main(_):
    strategy = tfscale.MeshStrategy(meshes.make_mesh(pipeline=NUM_STAGES.value))
    with strategy.scope():
        model = tfscale.PipelineModel(
            gpt.build_gpt(NUM_BLOCKS.value, WIDTH.value, 4, LENGTH.value, 0.0),
            num_microbatches=NUM_MICROBATCHES.value,
            schedule=SCHEDULE.value,
            balance="time",
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
    tokens = np.random.default_rng(0).integers(
        0, 256, (ROWS.value, LENGTH.value), "int32"
    )
    timelines = model.timelines(tokens, np.roll(tokens, -1, axis=1))
    print(tfscale.schedules.as_text(timelines, width=68))
    tfscale.schedules.save_png(timelines, OUTPUT.value)


if __name__ == "__main__":
    app.run(main)
