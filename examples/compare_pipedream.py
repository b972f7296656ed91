"""Compares asynchronous PipeDream with 1F1B: loss after as many batches.

    python -m examples.compare_pipedream \
        --flagfile=configs/compare_pipedream.flags

PipeDream updates weights by gradients of older weights, so its curve is not
that of one device. Both train the same GPT on the same text from the same
weights.
"""

import keras
from absl import app
from absl import flags

import tfscale
from examples import gpt
from examples import meshes
from examples import texts
from examples import training_flags as shared

flags.adopt_module_key_flags(shared)

NUM_STAGES = flags.DEFINE_integer(
    "num_stages", 2, "Pipeline stages.", lower_bound=1
)
NUM_BLOCKS = flags.DEFINE_integer(
    "num_blocks", 4, "Number of transformer blocks.", lower_bound=1
)
WINDOW = flags.DEFINE_integer(
    "window", 5, "Batches that PipeDream runs without a flush.", lower_bound=1
)

flags.register_multi_flags_validator(
    ["steps_per_epoch", "window"],
    lambda values: values["steps_per_epoch"] % values["window"] == 0,
    # Keras would run the last window to its end, on more batches than by 1F1B.
    "--steps_per_epoch must be a multiple of --window.",
)


def train(strategy, schedule, window):
    """The validation loss after each epoch."""
    keras.utils.set_random_seed(shared.SEED.value)
    with strategy.scope():
        model = tfscale.PipelineModel(
            gpt.build_gpt(
                NUM_BLOCKS.value,
                shared.WIDTH.value,
                shared.NUM_HEADS.value,
                shared.SEQUENCE_LENGTH.value,
                shared.DROPOUT.value,
            ),
            num_microbatches=1,
            schedule=schedule,
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam(shared.LEARNING_RATE.value)
        model.compile(optimizer, loss, steps_per_execution=window)
    model.pipeline_summary()
    batches, validation = texts.make_datasets(
        shared.TEXT_FILES.value,
        shared.SEQUENCE_LENGTH.value,
        shared.BATCH_SIZE.value,
        shared.SEED.value,
    )
    history = model.fit(
        batches,
        steps_per_epoch=shared.STEPS_PER_EPOCH.value,
        epochs=shared.NUM_EPOCHS.value,
        validation_data=validation,
        validation_steps=shared.VALIDATION_STEPS.value,
        shuffle=False,  # the datasets do that
        verbose=2,
    )
    return history.history["val_loss"]


def main(_):
    strategy = tfscale.MeshStrategy(meshes.make_mesh(pipeline=NUM_STAGES.value))
    synchronous = train(strategy, "1f1b", 1)
    asynchronous = train(strategy, "pipedream", WINDOW.value)
    print("batches     1f1b  pipedream   (validation loss)")
    for epoch, losses in enumerate(zip(synchronous, asynchronous), start=1):
        batches = epoch * shared.STEPS_PER_EPOCH.value
        print(f"{batches:7} {losses[0]:8.4f} {losses[1]:10.4f}")


if __name__ == "__main__":
    app.run(main)
