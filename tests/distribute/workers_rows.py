"""What workers train and one process trains too; run by both.

Each worker has another seed before it builds, and worker 0 that of the one
process: initial values, seeds and dropout masks are those of worker 0.
"""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np

import tfscale
from tests import same_numbers

RANDOM = np.random.RandomState(0)
Y = RANDOM.normal(size=(15, 3)).astype("float32")
X = RANDOM.normal(size=(15, 5)).astype("float32")
# Rows that are looked up twice by one worker, and by both.
TOKENS = RANDOM.randint(0, 4, (15, 4)).astype("int32")
WEIGHTS = RANDOM.uniform(0.1, 2.0, 15).astype("float32")
# The last batch is split 2 + 1 over two workers.
DATA = dict(x=X, y=Y, batch_size=6)


def dense():
    x = keras.Input((5,))
    h = keras.layers.Dense(4, activation="tanh", name="a")(x)
    h = keras.layers.Dense(4, activation="tanh", name="b")(h)
    return keras.Model(x, keras.layers.Dense(3, name="c")(h))


def tokens():
    x = keras.Input((4,), dtype="int32")
    h = keras.layers.Embedding(4, 4, name="a")(x)
    h = keras.layers.Flatten(name="flat")(h)
    return keras.Model(x, keras.layers.Dense(3, name="b")(h))


def normalized():
    x = keras.Input((5,))
    h = keras.layers.Dense(4, name="a")(x)
    h = keras.layers.BatchNormalization(name="own", momentum=0.6)(h)
    h = keras.layers.Dropout(0.5, name="drop")(h)
    h = keras.layers.BatchNormalization(
        name="all", momentum=0.6, synchronized=True
    )(h)
    return keras.Model(x, keras.layers.Dense(3, name="b")(h))


def adam():
    return keras.optimizers.Adam(0.02, global_clipnorm=0.3)


def scaled():
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9), initial_scale=64.0
    )


JOBS = {
    "plain": same_numbers.Job(
        dense,
        dict(DATA, sample_weight=WEIGHTS),
        optimizer=adam,
        loss=lambda: keras.losses.MeanSquaredError(
            reduction="mean_with_sample_weight"
        ),
        compile=lambda: {"metrics": ["mae"]},
        fit=dict(epochs=2, validation_data=(X[:7], Y[:7])),
    ),
    "embedding": same_numbers.Job(tokens, dict(DATA, x=TOKENS), optimizer=adam),
    "normalized": same_numbers.Job(normalized, DATA),
    "several steps": same_numbers.Job(
        dense,
        dict(DATA, batch_size=3),
        optimizer=adam,
        compile=lambda: {"steps_per_execution": 3},
    ),
    "no rows": same_numbers.Job(dense, dict(x=X[:13], y=Y[:13], batch_size=6)),
    "accumulated": same_numbers.Job(
        dense,
        dict(DATA, sample_weight=WEIGHTS),
        optimizer=adam,
        fit=dict(callbacks=[tfscale.callbacks.GradientAccumulation(2)]),
    ),
    "scaled": same_numbers.Job(dense, DATA, optimizer=scaled),
}


def plainly(num_replicas):
    return lambda job: same_numbers.on_zero(job, num_replicas, zero_stage=0)


@dataclasses.dataclass(frozen=True)
class Row:
    """A training.

    Attributes:
        job: What is trained.
        train: How workers train it.
        reference: How one process does.
        predicts: Whether what was trained is to predict, too.
    """

    job: same_numbers.Job
    train: Callable
    reference: Callable = same_numbers.on_one_device
    predicts: bool = False


def _pipeline(num_replicas, **options):
    return lambda job: same_numbers.on_mesh(job, 2, 2, num_replicas, **options)


def _ranks(num_replicas):
    return lambda job: same_numbers.on_ranks(job, 2, num_replicas)


# On two workers with two devices each.
ROWS = {
    "data": Row(JOBS["plain"], plainly(2), predicts=True),
    "embedding": Row(JOBS["embedding"], plainly(2)),
    "statistics and dropout": Row(JOBS["normalized"], plainly(2), plainly(2)),
    "steps per execution": Row(JOBS["several steps"], plainly(2)),
    "worker without rows": Row(JOBS["no rows"], plainly(2)),
    "loss scaling": Row(JOBS["scaled"], plainly(2)),
    "data 2 in each": Row(JOBS["no rows"], plainly(4), predicts=True),
    "zero in each": Row(
        JOBS["embedding"], lambda job: same_numbers.on_zero(job, 4)
    ),
    "pipeline in each": Row(JOBS["plain"], _pipeline(2), predicts=True),
    "accumulation": Row(
        JOBS["accumulated"],
        plainly(2),
        lambda job: same_numbers.on_one_device(
            dataclasses.replace(job, fit={})
        ),
    ),
    "model ranks in each": Row(JOBS["plain"], _ranks(2)),
}
# On four workers.
SHORT = {
    "data": Row(JOBS["plain"], plainly(4)),
    "pipeline in each": Row(JOBS["no rows"], _pipeline(4)),
}


def result(row, outcome):
    """What has to be equal, as NumPy arrays."""
    found = {
        "initial": outcome.initial,
        "variables": outcome.variables,
        "slots": outcome.slots,
        "logs": outcome.logs,
    }
    if row.predicts:
        predicted = outcome.model.predict(
            row.job.data["x"], row.job.data["batch_size"], verbose=0
        )
        found["predicted"] = predicted
    return found
