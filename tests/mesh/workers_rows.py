"""What workers train and one process trains too; run by both.

Each worker has another seed before it builds, and worker 0 that of the one
process: initial values, seeds and dropout masks are those of worker 0.
"""

import dataclasses
import itertools
from collections.abc import Callable
from unittest import mock

import keras
import numpy as np

import tfscale
from tests import same_numbers
from tfscale._internals import releases
from tfscale.variables import zero

RANDOM = np.random.RandomState(0)
Y = RANDOM.normal(size=(15, 3)).astype("float32")
X = RANDOM.normal(size=(15, 5)).astype("float32")
# Rows that are looked up twice by one worker, and by both.
TOKENS = RANDOM.randint(0, 4, (15, 4)).astype("int32")
SEQUENCES = RANDOM.normal(size=(15, 4, 6)).astype("float32")
WEIGHTS = RANDOM.uniform(0.1, 2.0, 15).astype("float32")
# Row 1, which worker 0 has, overflows in half precision.
LARGE = np.where(np.arange(15)[:, None] == 1, np.float32(20_000.0), Y)
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
    # The gradient of a bias before a normalization is rounding only.
    h = keras.layers.Dense(4, use_bias=False, name="a")(x)
    # Of two rows, that almost agree, a smaller one would enlarge rounding.
    options = dict(momentum=0.6, epsilon=0.1)
    h = keras.layers.BatchNormalization(name="own", **options)(h)
    # And so would be that of the scale.
    h = keras.layers.Dense(4, use_bias=False, name="between")(h)
    h = keras.layers.Dropout(0.5, name="drop")(h)
    h = keras.layers.BatchNormalization(
        name="all", synchronized=True, **options
    )(h)
    return keras.Model(x, keras.layers.Dense(3, name="b")(h))


def dropped():
    x = keras.Input((5,))
    h = keras.layers.Dense(4, activation="tanh", name="a")(x)
    h = keras.layers.Dropout(0.5, name="drop")(h)
    return keras.Model(x, keras.layers.Dense(3, name="b")(h))


def averaging():
    x = keras.Input((5,))
    h = keras.layers.Dense(4, use_bias=False, name="a")(x)
    h = keras.layers.BatchNormalization(name="own", momentum=0.6)(h)
    return keras.Model(x, keras.layers.Dense(3, name="b")(h))


def mixed(policy):
    """The dense model in half precision."""

    def build():
        keras.config.set_dtype_policy(policy)
        try:
            return dense()
        finally:
            keras.config.set_dtype_policy("float32")

    return build


def divided():
    """A sum over ranks, and behind it what is divided along the sequence."""
    inputs = keras.Input((4, 6))
    x = keras.layers.Dense(8, activation="relu", name="up")(inputs)
    x = keras.layers.Dense(6, name="down")(x)
    x = keras.layers.LayerNormalization(name="norm")(x)
    return keras.Model(inputs, keras.layers.Dense(6, name="out")(x))


def adam():
    return keras.optimizers.Adam(0.02, global_clipnorm=0.3)


def scaled(initial_scale=64.0):
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9), initial_scale=initial_scale
    )


JOBS = {
    "plain": same_numbers.Job(
        dense,
        dict(DATA, sample_weight=WEIGHTS),
        optimizer=lambda: keras.optimizers.SGD(
            0.05, momentum=0.9, global_clipnorm=0.3
        ),
        loss=lambda: keras.losses.MeanSquaredError(
            reduction="mean_with_sample_weight"
        ),
        compile=lambda: {"metrics": ["mae"]},
        fit=dict(epochs=2, validation_data=(X[:7], Y[:7])),
    ),
    "embedding": same_numbers.Job(tokens, dict(DATA, x=TOKENS), optimizer=adam),
    "lookups": same_numbers.Job(tokens, dict(DATA, x=TOKENS)),
    "normalized": same_numbers.Job(normalized, DATA),
    # Each of 4 replicas has two rows.
    "even": same_numbers.Job(
        dropped, dict(x=X[:8], y=Y[:8], batch_size=8), fit=dict(epochs=2)
    ),
    # Each of 4 replicas normalizes two rows.
    "averaging": same_numbers.Job(
        averaging,
        dict(x=X[:8], y=Y[:8], batch_size=8),
        fit=dict(epochs=2),
    ),
    "several steps": same_numbers.Job(
        dense,
        dict(DATA, batch_size=3),
        optimizer=adam,
        compile=lambda: {"steps_per_execution": 3},
    ),
    "no rows": same_numbers.Job(dense, dict(x=X[:13], y=Y[:13], batch_size=6)),
    "noise": same_numbers.Job(
        dense,
        DATA,
        fit=dict(callbacks=[tfscale.callbacks.GradientNoiseScale(0.5)]),
    ),
    "accumulated": same_numbers.Job(
        dense,
        dict(DATA, sample_weight=WEIGHTS),
        optimizer=adam,
        fit=dict(callbacks=[tfscale.callbacks.GradientAccumulation(2)]),
    ),
    "scaled": same_numbers.Job(dense, DATA, optimizer=scaled),
    # The first step is left out by both workers, and the scale halved.
    "float16": same_numbers.Job(
        mixed("mixed_float16"),
        dict(DATA, y=LARGE),
        optimizer=lambda: scaled(1024.0),
    ),
    "bfloat16": same_numbers.Job(mixed("mixed_bfloat16"), DATA),
    "sequences": same_numbers.Job(
        divided,
        dict(x=SEQUENCES, y=SEQUENCES[::-1], batch_size=6),
        # Divided by its root, a gradient that is almost 0 makes of a rounding
        # error a step.
        lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    ),
}


def plainly(num_replicas):
    return lambda job: same_numbers.on_zero(job, num_replicas, zero_stage=0)


def _by_speed(*speeds):
    """Replicas with unequal rows; the last batch leaves some of them none."""

    def train(job):
        mesh = tfscale.device_mesh(data=len(speeds), speeds=speeds)
        return same_numbers.plain(job, tfscale.MeshStrategy(mesh))

    return train


@dataclasses.dataclass(frozen=True)
class Row:
    """A training.

    Attributes:
        job: What is trained.
        train: How workers train it.
        reference: How one process does.
        predicts: Whether what was trained is to predict, too.
        rtol: See `same_numbers`.
        collectives: How many there are in the functions of training; None
            where nobody counts.
        in_validation: How many of these there are in that of validation.
        is_compiled: Whether XLA compiles clusters of the step.
    """

    job: same_numbers.Job
    train: Callable
    reference: Callable = same_numbers.on_one_device
    predicts: bool = False
    rtol: float = same_numbers.RTOL
    collectives: int | None = None
    in_validation: int = 0
    is_compiled: bool = False

    @property
    def possible_collectives(self) -> set[int]:
        """All numbers that may be counted."""
        if releases.TRACES_ITERATORS:
            return {self.collectives + self.in_validation}
        # A batch is drawn before the step, which may be traced for a last batch
        # of fewer rows once more.
        step, validation = self.collectives - 1, self.in_validation - 1
        if not self.in_validation:
            return {step, 2 * step}
        traces = itertools.product((1, 2), (1, 2))
        return {n * step + m * validation for n, m in traces}


def compiled(train):
    """The same training, compiled by XLA."""
    return lambda job: train(same_numbers.compiled(job))


def _pipeline(num_replicas, **options):
    return lambda job: same_numbers.on_mesh(job, 2, 2, num_replicas, **options)


def _ranks(num_replicas):
    return lambda job: same_numbers.on_ranks(job, 2, num_replicas)


def _fully_sharded(job):
    with mock.patch.object(zero, "MIN_ELEMENTS", 16):
        return same_numbers.on_zero(job, 4, zero_stage=3)


def _as_dealt(job):
    """Four replicas of one process, with the rows that those of workers have.

    `tf.distribute` deals pieces of a replica's size to workers in turn.
    """
    order = [0, 1, 4, 5, 2, 3, 6, 7]
    data = dict(job.data, x=job.data["x"][order], y=job.data["y"][order])
    return plainly(4)(dataclasses.replace(job, data=data))


def _sequences(job):
    """Two model ranks in each worker, which divide the sequence too."""
    mesh = tfscale.device_mesh(data=2, model=2)
    layouts = {
        "up/kernel": (None, "model"),
        "up/bias": ("model",),
        "down/kernel": ("model", None),
    }
    layout_map = same_numbers.layout_map_for(job, mesh, layouts)
    strategy = tfscale.MeshStrategy(mesh, layout_map, sequence_parallel=True)
    return same_numbers.plain(job, strategy)


# On two workers with two devices each.
ROWS = {
    # In training: is there a batch, the divisors of losses, gradients, and
    # logs. All but gradients in validation.
    "data": Row(
        *(JOBS["plain"], plainly(2)),
        predicts=True,
        collectives=4,
        in_validation=3,
    ),
    "embedding": Row(JOBS["embedding"], plainly(2), collectives=4),
    # And statistics of all, forwards and backwards. They were 14.
    "statistics and dropout": Row(
        JOBS["normalized"], plainly(2), plainly(2), collectives=6
    ),
    "steps per execution": Row(JOBS["several steps"], plainly(2)),
    "worker without rows": Row(JOBS["no rows"], plainly(2)),
    "loss scaling": Row(JOBS["scaled"], plainly(2), collectives=4),
    # Three layers round three results each, see pipeline/fit_test.py.
    "overflow in one worker": Row(
        JOBS["float16"], plainly(2), rtol=4.5 * 2.0**-10
    ),
    "bfloat16": Row(JOBS["bfloat16"], plainly(2), rtol=4.5 * 2.0**-7),
    "sequences in each": Row(JOBS["sequences"], _sequences),
    "data 2 in each": Row(JOBS["no rows"], plainly(4), predicts=True),
    "dropout, data 2 in each": Row(JOBS["even"], plainly(4), _as_dealt),
    # Gradients are in one collective of each of the two devices, here too.
    "zero in each": Row(
        JOBS["embedding"],
        lambda job: same_numbers.on_zero(job, 4),
        collectives=5,
    ),
    # And with them the statistics.
    "statistics, slots divided": Row(
        JOBS["averaging"],
        lambda job: same_numbers.on_zero(job, 4),
        plainly(4),
        collectives=5,
    ),
    "slots on the host of each": Row(
        JOBS["embedding"],
        lambda job: same_numbers.on_zero(job, 4, offload="slots"),
    ),
    "weights divided in each": Row(
        JOBS["embedding"], _fully_sharded, predicts=True, collectives=5
    ),
    "weights divided in each, accumulated": Row(
        JOBS["accumulated"],
        _fully_sharded,
        lambda job: same_numbers.on_one_device(
            dataclasses.replace(job, fit={})
        ),
        collectives=5,
    ),
    "sums of accumulation divided in each": Row(
        JOBS["accumulated"],
        lambda job: same_numbers.on_zero(job, 4, zero_stage=2),
        lambda job: same_numbers.on_one_device(
            dataclasses.replace(job, fit={})
        ),
    ),
    "pipeline in each": Row(JOBS["no rows"], _pipeline(2), predicts=True),
    "pipeline in each, validated": Row(
        JOBS["plain"], _pipeline(2), predicts=True
    ),
    # What is measured is summed with the gradients.
    "noise of gradients": Row(
        JOBS["noise"], plainly(2), plainly(2), collectives=4
    ),
    "by speed": Row(JOBS["plain"], _by_speed(1, 2), predicts=True),
    "by speed, data 2 in each": Row(
        JOBS["no rows"], _by_speed(1, 2, 4, 1), predicts=True
    ),
    "accumulation": Row(
        JOBS["accumulated"],
        plainly(2),
        lambda job: same_numbers.on_one_device(
            dataclasses.replace(job, fit={})
        ),
    ),
    "model ranks in each": Row(JOBS["plain"], _ranks(2)),
    "compiled": Row(
        *(JOBS["embedding"], compiled(plainly(2))),
        collectives=4,
        is_compiled=True,
    ),
    "statistics and dropout, compiled, data 2 in each": Row(
        *(JOBS["averaging"], compiled(plainly(4)), plainly(4)),
        is_compiled=True,
    ),
}
# On four workers.
SHORT = {
    "lookups of four": Row(JOBS["lookups"], plainly(4)),
    "data of four": Row(JOBS["plain"], plainly(4)),
    "pipeline in each of four": Row(JOBS["no rows"], _pipeline(4)),
}
# What other rows show too: for `--exhaustive`.
CROSSED = (
    # As in the cases "one row", "own data" and "offline".
    "worker without rows",
    "steps per execution",
    "overflow in one worker",
    "sequences in each",
    "zero in each",
    "loss scaling",
    "bfloat16",
    "data 2 in each",
    "pipeline in each, validated",
    "slots on the host of each",
    "statistics, slots divided",
    "weights divided in each, accumulated",
    "sums of accumulation divided in each",
    "model ranks in each",
    "data of four",
    "pipeline in each of four",
    # As it is compiled.
    "embedding",
    "statistics and dropout, compiled, data 2 in each",
    "by speed, data 2 in each",
    # As in workers_cases.py.
    "dropout, data 2 in each",
    "weights divided in each",
    "accumulation",
    "noise of gradients",
)
ALWAYS = tuple(name for name in (*ROWS, *SHORT) if name not in CROSSED)


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
