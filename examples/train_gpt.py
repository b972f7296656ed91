"""Trains a byte-level GPT over a mesh of devices with `model.fit`.

    python -m examples.train_gpt --flagfile=configs/gpt_pipeline.flags
    python -m examples.train_gpt --flagfile=configs/gpt_tensor_parallel.flags
    python -m examples.train_gpt --flagfile=configs/gpt_3d.flags
    python -m examples.train_gpt --flagfile=configs/gpt_packed.flags
    python -m examples.train_gpt --mesh=auto
    python -m examples.train_gpt --flagfile=configs/gpt_coordinator.flags
    python -m tfscale.launch --num_workers=2 --num_ps=1 -m examples.train_gpt \
        --flagfile=configs/gpt_parameter_server.flags

The mesh is data x pipeline x model: copies of the model, stages of layers, and
the ranks that each layer is split over. The last two are for several machines,
docs/several_machines.md and docs/strategies.md; on parameter servers there is
no mesh, and each worker makes steps of its own. The text is the source of the
Python standard library that runs this, unless `--text_files` says otherwise;
with `--pack` it is cut at empty lines, and short pieces share a row of a batch.
Without accelerators, virtual CPU devices of one core each take their place.
"""

import logging
import math
import os

# Before TensorFlow is imported: it has notes on how it was built. To see them,
# set another level (0 is all).
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from absl import app
from absl import flags

import tfscale
from examples import gpt
from examples import meshes
from examples import texts
from examples import training_flags as shared

flags.adopt_module_key_flags(shared)

STRATEGY = flags.DEFINE_enum(
    "strategy",
    "mesh",
    ["mesh", "parameter_server"],
    "How to train; on parameter servers, start the program by the launcher.",
)
MESH = flags.DEFINE_enum(
    "mesh",
    "flags",
    ["flags", "auto"],
    "Whether the flags say what the mesh and the microbatches are, or "
    "`tfscale.plan` finds what is the fastest on these devices.",
)
NUM_BLOCKS = flags.DEFINE_integer(
    "num_blocks", 4, "Number of transformer blocks.", lower_bound=1
)
NUM_STAGES = flags.DEFINE_integer(
    "num_stages",
    None,
    "Pipeline stages. By default all accelerators over --num_replicas and "
    "--model_parallel, or 2 where there are none.",
    lower_bound=1,
)
NUM_MICROBATCHES = flags.DEFINE_integer(
    "num_microbatches",
    8,
    "Microbatches per replica and step. With 1, and one stage, the model is "
    "trained without a pipeline.",
    lower_bound=1,
)
SCHEDULE = flags.DEFINE_enum(
    "schedule",
    "1f1b",
    meshes.SCHEDULES,
    "Order of the microbatches.",
)
BALANCE = flags.DEFINE_enum(
    "balance",
    "flops",
    ["params", "flops", "time"],
    "What is to be the same in every stage.",
)
RECOMPUTE = flags.DEFINE_boolean(
    "recompute", False, "Trade time for memory in the backward pass."
)
PACK = flags.DEFINE_boolean(
    "pack",
    False,
    "Learn from documents, the text between empty lines: several in a row of "
    "a batch, none of which sees another.",
)
COORDINATOR = flags.DEFINE_boolean(
    "coordinator",
    False,
    "Of several processes (`python -m tfscale.launch`), the first one runs the "
    "program, and the others lend it their devices.",
)
MODEL_FILE = flags.DEFINE_string(
    "model_file", "gpt.keras", "Where to save the model; it is plain Keras."
)
PROMPT = flags.DEFINE_string("prompt", "def ", "Beginning of the sample.")
SAMPLE_LENGTH = flags.DEFINE_integer(
    "sample_length", 300, "Bytes of the sample.", lower_bound=0
)

flags.register_validator(
    "model_file",
    lambda value: value.endswith(".keras"),
    "--model_file must end in .keras.",
)
flags.register_multi_flags_validator(
    ["strategy", "num_stages", "num_microbatches"],
    lambda values: (
        values["strategy"] == "mesh"
        or values["num_stages"] == values["num_microbatches"] == 1
    ),
    "--strategy=parameter_server needs --num_stages=1 --num_microbatches=1.",
)
flags.register_multi_flags_validator(
    ["strategy", "mesh"],
    lambda values: values["strategy"] == "mesh" or values["mesh"] == "flags",
    "--mesh=auto needs --strategy=mesh.",
)
flags.register_multi_flags_validator(
    ["strategy", "num_replicas", "model_parallel"],
    lambda values: (
        values["strategy"] == "mesh"
        or (values["num_replicas"], values["model_parallel"]) == (1, 1)
    ),
    "--strategy=parameter_server goes with one replica and one model rank.",
)


def build_model():
    """The GPT of the flags, with the same weights each time."""
    keras.utils.set_random_seed(shared.SEED.value)
    return gpt.build_gpt(
        NUM_BLOCKS.value,
        shared.WIDTH.value,
        shared.NUM_HEADS.value,
        shared.SEQUENCE_LENGTH.value,
        shared.DROPOUT.value,
        packed=PACK.value,
    )


def make_strategy():
    """A strategy over the mesh of the flags, or over parameter servers."""
    if STRATEGY.value == "parameter_server":
        return tfscale.ParameterServerStrategy()
    mesh = meshes.make_mesh(
        data=shared.NUM_REPLICAS.value,
        pipeline=NUM_STAGES.value,
        model=shared.MODEL_PARALLEL.value,
    )
    if shared.MODEL_PARALLEL.value == 1:
        return tfscale.MeshStrategy(mesh, zero_stage=shared.ZERO_STAGE.value)
    # Chosen by names and shapes, of a model that is thrown away.
    layout_map = tfscale.auto_layout_map(build_model, mesh)
    return tfscale.MeshStrategy(
        mesh, layout_map, zero_stage=shared.ZERO_STAGE.value
    )


def best_plan():
    """The fastest plan for all devices, after a table of the others."""
    num_devices = math.prod(meshes.make_mesh(pipeline=None).shape)
    plans = tfscale.plan(
        build_model, num_devices=num_devices, batch_size=shared.BATCH_SIZE.value
    )
    plans.table()
    return plans.best


def in_stages(model):
    """The model as a pipeline of stages and microbatches."""
    rows = shared.BATCH_SIZE.value // shared.NUM_REPLICAS.value
    return tfscale.PipelineModel(
        model,
        num_microbatches=NUM_MICROBATCHES.value,
        schedule=SCHEDULE.value,
        balance=BALANCE.value,
        recompute=RECOMPUTE.value,
        # Rows of the largest microbatch.
        microbatch_size=-(-rows // NUM_MICROBATCHES.value),
    )


def make_optimizer():
    """AdamW with a warm-up and a cosine, as GPTs are trained."""
    num_steps = shared.NUM_EPOCHS.value * shared.STEPS_PER_EPOCH.value
    warmup_steps = num_steps // 20
    learning_rate = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=shared.LEARNING_RATE.value / 10,
        decay_steps=num_steps - warmup_steps,
        warmup_target=shared.LEARNING_RATE.value,
        warmup_steps=warmup_steps,
    )
    return keras.optimizers.AdamW(
        learning_rate, weight_decay=0.1, global_clipnorm=1.0
    )


def main(argv):
    del argv
    if COORDINATOR.value:
        # In all processes but the first it does not come back.
        tfscale.initialize(coordinator=True)
    if STRATEGY.value == "parameter_server":
        # Of steps and servers TensorFlow says much that is of no interest.
        logging.getLogger("tensorflow").setLevel(logging.WARNING)
        tfscale.initialize()  # in workers and servers it does not return
    plan = best_plan() if MESH.value == "auto" else None
    strategy = make_strategy() if plan is None else plan.strategy()
    make = texts.make_packed_datasets if PACK.value else texts.make_datasets
    train, validation = make(
        shared.TEXT_FILES.value,
        shared.SEQUENCE_LENGTH.value,
        shared.BATCH_SIZE.value,
        shared.SEED.value,
    )

    with strategy.scope():
        model = build_model()
        if STRATEGY.value == "parameter_server":
            model = tfscale.ParameterServerModel(model)
        elif plan is not None:
            model = plan.wrap(model)
        elif len(strategy.device_rows[0]) > 1 or NUM_MICROBATCHES.value > 1:
            model = in_stages(model)
        model.compile(
            make_optimizer(),
            keras.losses.SparseCategoricalCrossentropy(
                from_logits=True,
                # Where documents leave a row's end free, nothing is counted.
                reduction="mean_with_sample_weight",
            ),
        )
    if isinstance(model, tfscale.PipelineModel):
        model.pipeline_summary()
    if (plan.settings.model if plan else shared.MODEL_PARALLEL.value) > 1:
        tfscale.sharding_summary(model)
    model.fit(
        train,
        validation_data=validation,
        epochs=shared.NUM_EPOCHS.value,
        steps_per_epoch=shared.STEPS_PER_EPOCH.value,
        validation_steps=shared.VALIDATION_STEPS.value,
        shuffle=False,  # the datasets do that
        callbacks=[tfscale.callbacks.Throughput()],
    )

    model.save(MODEL_FILE.value)
    # What was saved is plain Keras: it samples without tfscale.
    plain = keras.models.load_model(MODEL_FILE.value)
    print(f"\nSaved {MODEL_FILE.value}. A sample of it:\n")
    print(
        gpt.sample(
            plain, PROMPT.value, SAMPLE_LENGTH.value, 0.8, shared.SEED.value
        )
    )


if __name__ == "__main__":
    app.run(main)
