"""Fine-tunes BERT to answer questions about a passage, on any mesh.

    python -m examples.finetune_bert --flagfile=configs/finetune_bert.flags
    python -m examples.finetune_bert --preset=bert_base_en_uncased \
        --squad=train-v2.0.json --length=384 --mesh=auto

keras_hub's `BertBackbone` with the logits of an answer's first and last token
(Devlin et al., 2019, section 4.2). Without `--preset` it is a small one with
random weights, and without `--squad` the passages are built in: nothing is
downloaded. A preset is a name of keras_hub's, which it downloads, or a folder
that `save_to_preset` wrote.
"""

import math
import os

# Before TensorFlow is imported: it has notes on how it was built. To see them,
# set another level (0 is all).
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from absl import app
from absl import flags

import tfscale
from examples import hub
from examples import meshes
from examples import passages

PRESET = flags.DEFINE_string(
    "preset", None, "Name or folder of a preset; a small model by default."
)
SQUAD = flags.DEFINE_string(
    "squad", None, "File of SQuAD 1.1 or 2.0. Built-in passages by default."
)
MESH = flags.DEFINE_enum(
    "mesh",
    "flags",
    ["flags", "auto"],
    "Whether the flags say what the mesh is, or `tfscale.plan` finds it.",
)
NUM_REPLICAS = flags.DEFINE_integer(
    "num_replicas", 1, "Copies of the model.", lower_bound=1
)
NUM_STAGES = flags.DEFINE_integer(
    "num_stages", 1, "Pipeline stages.", lower_bound=1
)
MODEL_PARALLEL = flags.DEFINE_integer(
    "model_parallel", 1, "Devices that each layer is split over.", lower_bound=1
)
NUM_MICROBATCHES = flags.DEFINE_integer(
    "num_microbatches", 4, "Microbatches of a pipeline's step.", lower_bound=1
)
LENGTH = flags.DEFINE_integer(
    "length", 40, "Tokens of a question and its passage.", lower_bound=8
)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 32, "Questions of a step.", lower_bound=1
)
NUM_EPOCHS = flags.DEFINE_integer(
    "num_epochs", 8, "Epochs to train.", lower_bound=1
)
NUM_PASSAGES = flags.DEFINE_integer(
    "num_passages", 400, "Built-in passages to learn from.", lower_bound=8
)
LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 1e-3, "5e-5 suits a preset.", lower_bound=0.0
)
DROPOUT = flags.DEFINE_float(
    "dropout", 0.0, "Dropout of the small model.", lower_bound=0.0
)
SEED = flags.DEFINE_integer("seed", 0, "Seed of weights and passages.")
MODEL_FILE = flags.DEFINE_string(
    "model_file", "bert.keras", "Where to save the model; it is plain Keras."
)

flags.register_validator(
    "learning_rate", math.isfinite, "A learning rate is a finite number."
)


def make_tokenizer(models):
    """The tokenizer of the preset, or that of the built-in passages."""
    if PRESET.value is None:
        return models.BertTokenizer(vocabulary=passages.vocabulary())
    try:
        return models.BertTokenizer.from_preset(PRESET.value)
    except Exception as error:
        raise app.UsageError(
            f"--preset={PRESET.value} cannot be loaded: {error}\nWithout a "
            "network, pass a folder that `save_to_preset` wrote, or leave the "
            "flag out for a small model with random weights."
        ) from error


def build_model(models, load_weights=True):
    """BERT with the logits of an answer's first and last token.

    Args:
        models: The module `keras_hub.models`.
        load_weights: Whether to load those of the preset.

    Returns:
        A functional `keras.Model` from the inputs of `BertBackbone` to a dict
        of logits "start" and "end", each of shape `(batch, length)`.
    """
    keras.utils.set_random_seed(SEED.value)
    if PRESET.value is not None:
        backbone = models.BertBackbone.from_preset(
            PRESET.value, load_weights=load_weights
        )
    else:
        backbone = models.BertBackbone(
            vocabulary_size=len(passages.vocabulary()),
            num_layers=2,
            num_heads=4,
            hidden_dim=64,
            intermediate_dim=128,
            dropout=DROPOUT.value,
            max_sequence_length=LENGTH.value,
        )
    logits = keras.layers.Dense(2, dtype="float32", name="span")(
        backbone.output["sequence_output"]
    )
    return keras.Model(
        backbone.input, {"start": logits[..., 0], "end": logits[..., 1]}
    )


def compile_model(model, num_rows):
    """Compiles it with the losses and metrics of both ends."""
    learning_rate = keras.optimizers.schedules.PolynomialDecay(
        LEARNING_RATE.value,
        NUM_EPOCHS.value * -(-num_rows // BATCH_SIZE.value),
        end_learning_rate=0.0,
    )
    model.compile(
        keras.optimizers.AdamW(learning_rate, global_clipnorm=1.0),
        {
            end: keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            for end in ("start", "end")
        },
        metrics={end: ["accuracy"] for end in ("start", "end")},
    )


def make_strategy_and_wrap(models):
    """A strategy over the mesh, and what makes a pipeline of a model."""

    def build():
        return build_model(models, load_weights=False)

    if MESH.value == "auto":
        num_devices = math.prod(meshes.make_mesh(pipeline=None).shape)
        plans = tfscale.plan(
            build,
            num_devices=num_devices,
            batch_size=BATCH_SIZE.value,
            length=LENGTH.value,
        )
        plans.table()
        return plans.best.strategy(), plans.best.wrap
    mesh = meshes.make_mesh(
        data=NUM_REPLICAS.value,
        pipeline=NUM_STAGES.value,
        model=MODEL_PARALLEL.value,
    )
    layout_map = None
    if MODEL_PARALLEL.value > 1:
        layout_map = tfscale.auto_layout_map(build, mesh)
    strategy = tfscale.MeshStrategy(mesh, layout_map)
    if NUM_STAGES.value == 1:
        return strategy, lambda model: model
    return strategy, lambda model: tfscale.PipelineModel(
        model, NUM_MICROBATCHES.value
    )


def make_encode(tokenizer):
    """What turns questions into rows of the length of the flags."""
    ids = {
        token: int(tokenizer.token_to_id(token))
        for token in ("[CLS]", "[SEP]", "[PAD]")
    }

    def encode(questions):
        words = sorted(
            {word for q in questions for word in q.question + q.passage}
        )
        rows = tokenizer(words)
        rows = rows if isinstance(rows, list) else rows.to_list()
        tokens_of = {
            word: [int(token) for token in row]
            for word, row in zip(words, rows, strict=True)
        }
        return passages.encode(questions, tokens_of, LENGTH.value, ids)

    return encode


def exact_match(model, encoded):
    """Share of questions of which both ends of the answer are right."""
    inputs, targets, words_of = encoded
    logits = model.predict(inputs, batch_size=BATCH_SIZE.value, verbose=0)
    spans = passages.best_spans(logits["start"], logits["end"], words_of)
    truth = np.stack([targets["start"], targets["end"]], axis=1)
    return float(np.mean(np.all(spans == truth, axis=1)))


def answer(model, encode, question, passage):
    """The answer's words."""
    words = passage.split()
    asked = passages.Question(question.split(), words, None, None)
    inputs, _, words_of = encode([asked])
    logits = model.predict(inputs, verbose=0)
    first, last = passages.best_spans(logits["start"], logits["end"], words_of)[
        0
    ]
    if first == 0:
        return "(no answer)"
    return " ".join(words[words_of[0][first] : words_of[0][last] + 1])


def main(argv):
    del argv
    models = hub.models()
    # First, as virtual devices need a TensorFlow that has not started.
    strategy, wrap = make_strategy_and_wrap(models)
    encode = make_encode(make_tokenizer(models))
    if SQUAD.value:
        questions = passages.squad(SQUAD.value)
        # Every twentieth is to be answered, not to be learned.
        held_out = encode(questions[::20])
        del questions[::20]
        train = encode(questions)
    else:
        train = encode(passages.built_in(NUM_PASSAGES.value, SEED.value))
        held_out = encode(passages.built_in(50, SEED.value + 1))
    for name, rows in (("train", train), ("held out", held_out)):
        print(f"Questions ({name}): {len(rows[2])}")
        if not len(rows[2]):
            raise app.UsageError("No answer lies within --length tokens.")
    with strategy.scope():
        model = build_model(models)
        wrapped = wrap(model)
        compile_model(wrapped, len(train[2]))
    print(f"Exact match before: {exact_match(wrapped, held_out):.3f}")
    wrapped.fit(
        *train[:2],
        batch_size=BATCH_SIZE.value,
        epochs=NUM_EPOCHS.value,
        verbose=2,
    )
    print(f"Exact match: {exact_match(wrapped, held_out):.3f}")
    wrapped.save(MODEL_FILE.value)
    plain = keras.models.load_model(MODEL_FILE.value)
    said = answer(plain, encode, "Who is Packt ?", "Packt is a publisher .")
    print(f"Packt is a publisher. Who is Packt? {said}")


if __name__ == "__main__":
    app.run(main)
