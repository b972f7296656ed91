"""Distils several teachers into a small student, on any mesh.

    python -m examples.distill --flagfile=configs/distill.flags
    python -m examples.distill --flagfile=configs/distill_noisy.flags

Teachers learn from a few labeled rows. The student learns in two stages: their
soft targets of many rows without labels, then labels and soft targets together
(Yang et al. 2019). `--offline` predicts the logits of the teachers once, so
that no teacher is in the step. With `--noisy_student_rounds` a student with
dropout learns from pseudo-labels, and is the next teacher (Xie et al. 2020).
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from absl import app
from absl import flags

from examples import distillation
from examples import finite_float
from examples import mlp

flags.adopt_module_key_flags(mlp)

NUM_TEACHERS = flags.DEFINE_integer(
    "num_teachers", 2, "Whose mean logits are learned.", lower_bound=1
)
TEMPERATURE = finite_float.define(
    "temperature", 3.0, "Of both softmaxes.", lower_bound=0.1
)
ALPHA = finite_float.define(
    "alpha",
    0.5,
    "Share of the soft targets in the second stage.",
    lower_bound=0.0,
    upper_bound=1.0,
)
NUM_Labeled = flags.DEFINE_integer(
    "num_labeled", 256, "Rows with labels.", lower_bound=32
)
OFFLINE = flags.DEFINE_boolean(
    "offline", False, "Predict the logits of the teachers once."
)
NOISY_STUDENT_ROUNDS = flags.DEFINE_integer(
    "noisy_student_rounds",
    0,
    "Rounds in which a student becomes the teacher; 0 distils instead.",
    lower_bound=0,
)
CONFIDENCE = finite_float.define(
    "confidence", 0.3, "What pseudo-labels must have.", lower_bound=0.0
)


def distil(strategy, student, teachers, x, y, alpha):
    """One stage: the student learns labels and the teachers' soft targets."""
    compiled = distillation.losses(alpha, TEMPERATURE.value)
    if OFFLINE.value:
        logits = [mlp.predict(strategy, teacher, x) for teacher in teachers]
        targets = {"hard": y, "soft": np.mean(logits, axis=0)}
        with strategy.scope():
            model = distillation.with_logits(student)
    else:
        targets = {"hard": y, "soft": y}  # the model has its own soft targets
        with strategy.scope():
            model = distillation.with_teachers(student, teachers)
    mlp.train(strategy, model, x, targets, compiled=compiled)


def noisy_rounds(strategy, teacher, labeled, unlabeled):
    """A student with dropout learns labels and pseudo-labels, in rounds."""
    for number in range(NOISY_STUDENT_ROUNDS.value):
        logits = mlp.predict(strategy, teacher, unlabeled)
        shares = keras.ops.convert_to_numpy(keras.ops.softmax(logits))
        is_sure = shares.max(-1) > CONFIDENCE.value
        x = np.concatenate([labeled[0], unlabeled[is_sure]])
        y = np.concatenate([labeled[1], shares.argmax(-1)[is_sure]])
        with strategy.scope():
            student = mlp.build(64, name=f"student_{number}", dropout=0.2)
        mlp.train(strategy, student, x, y)
        teacher = student
    return teacher


def main(argv):
    del argv
    strategy = mlp.make_strategy()
    keras.utils.set_random_seed(mlp.SEED.value)
    labeled = mlp.clusters(NUM_Labeled.value, mlp.SEED.value)
    unlabeled, _ = mlp.clusters(mlp.NUM_ROWS.value, mlp.SEED.value + 1)
    test = mlp.clusters(1024, mlp.SEED.value + 2)
    with strategy.scope():
        teachers = [
            mlp.build(64, name=f"teacher_{i}")
            for i in range(NUM_TEACHERS.value)
        ]
        student = mlp.build(8, name="student")
    for number, teacher in enumerate(teachers):
        mlp.train(strategy, teacher, *labeled)
        found = mlp.accuracy(strategy, teacher, *test)
        print(f"teacher {number}: accuracy {found:.3f}")
    if NOISY_STUDENT_ROUNDS.value:
        student = noisy_rounds(strategy, teachers[0], labeled, unlabeled)
    else:
        no_labels = np.zeros(len(unlabeled), "int64")
        distil(strategy, student, teachers, unlabeled, no_labels, 1.0)
        distil(strategy, student, teachers, *labeled, ALPHA.value)
    found = mlp.accuracy(strategy, student, *test)
    print(f"student: accuracy {found:.3f}")


if __name__ == "__main__":
    app.run(main)
