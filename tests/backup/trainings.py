"""Trainings to be killed at any point; each in a process of its own."""

import hashlib
import itertools
import json
import math
import os
import random
import signal
import types

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tfscale.backup.files.storage import LocalStorage

ROWS, WIDTH = 40, 6


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01, use_ema=True),
    "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9, use_ema=True),
}


def train(
    *,
    folder,
    data="arrays",
    mesh=None,
    options=None,
    kill=None,
    epochs=3,
    save_freq=2,
    callbacks=(),
    steps_per_execution=1,
    validate=True,
    validation_freq=1,
    backup=None,
    model="mlp",
    batch_size=8,
    loss="mse",
    terminate=None,
    optimizer="sgd",
):
    """Trains, and prints what came of it.

    Args:
        folder: Of the backups; logs of callbacks lie beside it.
        data: A key of `DATA`.
        mesh: Arguments of `tfscale.device_mesh`, or None for plain Keras.
        options: Other arguments of `MeshStrategy`, with "microbatches".
        kill: Where to be killed: "batch N", "save N" (the N-th thing that is
            done to a file), "validation N", "epoch N", or "restore".
        epochs: As of `fit`.
        save_freq: As of `BackupAndRestore`.
        callbacks: Keys of `CALLBACKS`.
        steps_per_execution: As of `compile`.
        validate: Whether there is validation data, or which: a key of `DATA`.
        validation_freq: As of `fit`.
        backup: Other arguments of `BackupAndRestore`; False for none.
        model: A key of `MODELS`.
        batch_size: Rows of a batch.
        loss: As of `compile`.
        terminate: The batch at whose end the process gets a SIGTERM.
        optimizer: A key of `OPTIMIZERS`; "sgd" is traced in a third of the
            time.
    """
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(5)
    if mesh:
        tfscale.use_virtual_devices(math.prod(mesh.values()))
        strategy = mesh_strategy(mesh, dict(options or {}))
    else:
        strategy = tf.distribute.get_strategy()
    with strategy.scope():
        net = MODELS[model]()
        if mesh and mesh.get("pipeline"):
            net = tfscale.PipelineModel(
                net, num_microbatches=2, balance="params"
            )
        net.compile(
            OPTIMIZERS[optimizer](),
            loss,
            metrics=["mae"],
            steps_per_execution=steps_per_execution,
        )
    seen = Seen(kill, terminate)
    used = [CALLBACKS[name](folder) for name in callbacks] + [seen]
    if backup is not False:
        used.append(
            tfscale.callbacks.BackupAndRestore(
                folder, save_freq=save_freq, **(backup or {})
            )
        )
    kill_in_saves(kill)
    with strategy.scope():
        x, arguments = DATA[data](batch_size)
        if isinstance(validate, str):
            arguments.update(for_validation(*DATA[validate](batch_size)))
    if validate is True:
        # Shuffled anew in each validation: its iterators count.
        rows = tf.data.Dataset.from_tensor_slices(rows_of(2, 24))
        rows = rows.shuffle(24, seed=4, reshuffle_each_iteration=True)
        arguments["validation_data"] = rows.batch(8)
        if data == "repeat":
            rows = not_read_ahead(rows.repeat())
            arguments["validation_data"] = rows.batch(8)
            arguments["validation_steps"] = 4  # of which each 3 are a round
    if validate:
        arguments["validation_freq"] = validation_freq
    history = net.fit(x, epochs=epochs, verbose=0, callbacks=used, **arguments)
    inner = net.model if hasattr(net, "model") else net
    result = {
        "weights": digest([v.numpy() for v in inner.variables]),
        "optimizer": digest([v.numpy() for v in net.optimizer.variables]),
        "values": [v.numpy().tolist() for v in inner.trainable_variables],
        "history": history.history,
        "epochs": history.epoch,
        "iterations": int(net.optimizer.iterations.numpy()),
        "steps": seen.steps,
        "tested": seen.tested,
        "random": [random.random(), float(np.random.rand())],
        "keras_random": float(keras.random.uniform(())),
    }
    if os.path.exists(f"{folder}-board.txt"):
        with open(f"{folder}-board.txt") as file:
            # What was not saved is made, and written, again.
            result["board"] = dict(line.split(": ") for line in file)
    if model == "counting":
        result["seen"] = float(inner.layers[0].seen.numpy())
    print("RESULT " + json.dumps(result), flush=True)


def mesh_strategy(mesh, options):
    mesh = tfscale.device_mesh(**mesh)
    # Weights that are divided over replicas must be large, or named.
    data = "data" if options.get("zero_stage") == 3 else None
    layout_map = {".*up/kernel": (None, data)} if data else None
    if mesh.shape[mesh.axis_names.index("model")] > 1:
        layout_map = keras.distribution.LayoutMap(mesh)
        layout_map[".*up/kernel"] = (None, "model")
        layout_map[".*down/kernel"] = ("model", data)
    return tfscale.MeshStrategy(mesh, layout_map, **options)


class CountedDense(keras.layers.Dense):
    """Has a variable and a generator of TensorFlow, which nothing lists."""

    def build(self, input_shape):
        super().build(input_shape)
        self.calls = tf.Variable(0.0, trainable=False)
        self.noise = tf.random.Generator.from_seed(3)

    def call(self, x, training=False):
        self.calls.assign_add(1.0)
        draw = self.noise.uniform((), maxval=0.01)
        return super().call(x) + 0.001 * self.calls + draw


def mlp(last=keras.layers.Dense):
    return keras.Sequential(
        [
            keras.Input((WIDTH,)),
            keras.layers.Dense(8, "relu", name="up"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(4, name="down"),
            last(1, name="last"),
        ]
    )


class Counting(keras.layers.Layer):
    """Adds up what it is trained on."""

    def build(self, input_shape):
        self.seen = self.add_weight(
            shape=(), initializer="zeros", dtype="float64", trainable=False
        )

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(keras.ops.sum(keras.ops.cast(x, "float64")))
        return x


def counting():
    return keras.Sequential(
        [keras.Input((1,)), Counting(), keras.layers.Dense(1)]
    )


def plain():
    """Draws nothing, and so comes out the same on any mesh."""
    layers = [keras.layers.Dense(8, "relu", name="up")]
    layers += [keras.layers.Dense(4, name="down"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers])


def normalized():
    layers = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization()]
    layers += [keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    return keras.Sequential(layers)  # built by `fit`


MODELS = {
    "mlp": mlp,
    "wide": lambda: mlp(lambda units, name: keras.layers.Dense(2, name=name)),
    "counted": lambda: mlp(CountedDense),
    "normalized": normalized,
    "counting": counting,
    "plain": plain,
}


def rows_of(seed, rows=ROWS):
    draw = np.random.RandomState(seed)
    return (
        draw.randn(rows, WIDTH).astype("float32"),
        draw.randn(rows, 1).astype("float32"),
    )


def shuffled(batch_size, seed=7):
    rows = tf.data.Dataset.from_tensor_slices(rows_of(1))
    rows = rows.shuffle(ROWS, seed=seed, reshuffle_each_iteration=True)
    return rows.batch(batch_size)


def not_read_ahead(dataset):
    """TensorFlow shuffles it the same way each time, if it repeats."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


def distributed(dataset):
    return tf.distribute.get_strategy().experimental_distribute_dataset(dataset)


class Rows(keras.utils.PyDataset):
    """Batches by their numbers, which Keras shuffles."""

    def __init__(self, size, **arguments):
        super().__init__(**arguments)
        self._size = size

    def __len__(self):
        return ROWS // self._size

    def __getitem__(self, index):
        begin = index * self._size
        return [rows[begin : begin + self._size] for rows in rows_of(1)]


def generated(size):
    """Ends never, and begins anew in each process."""
    rows = Rows(size)
    for index in itertools.count():
        yield tuple(rows[index % len(rows)])


def for_validation(data, arguments):
    """Arguments of `fit`, from what it would have for training."""
    if "y" in arguments:
        data = (data, arguments["y"])
    found = {"validation_data": data}
    for one, other in (
        ("steps_per_epoch", "validation_steps"),
        ("batch_size", "validation_batch_size"),
    ):
        if one in arguments:
            found[other] = arguments[one]
    return found


DATA = {
    "arrays": lambda size: (
        rows_of(1)[0],
        {"y": rows_of(1)[1], "batch_size": size},
    ),
    "shuffle": lambda size: (shuffled(size), {}),
    "unknown": lambda size: (
        shuffled(size).filter(lambda x, y: tf.shape(x)[0] > 0),
        {},
    ),
    "repeat": lambda size: (
        shuffled(size).repeat(),
        {"steps_per_epoch": 6},
    ),
    "twice": lambda size: (shuffled(size).repeat(2), {}),
    "distributed": lambda size: (distributed(shuffled(size)), {}),
    "distributed unknown": lambda size: (
        distributed(shuffled(size).filter(lambda x, y: tf.shape(x)[0] > 0)),
        {},
    ),
    "distributed tfscale": lambda size: (
        distributed(DATA["tfscale"](size)[0]),
        {},
    ),
    "distributed repeat": lambda size: (
        distributed(not_read_ahead(shuffled(size).repeat())),
        {"steps_per_epoch": 6},
    ),
    "from function": lambda size: (
        tf.distribute.get_strategy().distribute_datasets_from_function(
            lambda context: shuffled(context.get_per_replica_batch_size(size))
        ),
        {},
    ),
    "by number": lambda size: (Rows(size), {"shuffle": False}),
    "by number shuffled": lambda size: (Rows(size), {}),
    "workers": lambda size: (Rows(size, workers=2), {"shuffle": False}),
    "workers shuffled": lambda size: (Rows(size, workers=2), {}),
    "generator": lambda size: (generated(size), {"steps_per_epoch": 5}),
    # As a strategy needs it, under which Keras looks at a first batch.
    "not ahead": lambda size: (
        not_read_ahead(shuffled(size).repeat()),
        {"steps_per_epoch": 6},
    ),
    "counting": lambda size: (
        tfscale.data.pipeline(
            tfscale.data.arrays(
                np.arange(1.0, ROWS + 1, dtype="float32")[:, None],
                np.zeros([ROWS, 1], "float32"),
            ),
            batch_size=size,
            seed=3,
        ),
        {},
    ),
    "tfscale": lambda size: (
        tfscale.data.pipeline(
            tfscale.data.arrays(*rows_of(1)), batch_size=size, seed=3
        ),
        {},
    ),
}


class Seen(keras.callbacks.Callback):
    """Notes the steps that were made, and kills where it was asked to."""

    def __init__(self, kill, terminate):
        super().__init__()
        self._terminate = terminate
        self.steps = []
        self.tested = []
        self._kill = kill
        self._count = {"batch": 0, "validation": 0, "epoch": 0}

    def _at(self, kind):
        self._count[kind] += 1
        if self._kill == f"{kind} {self._count[kind]}":
            die()

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append([self._epoch, batch, logs["loss"]])
        print("STEP", self._epoch, batch, flush=True)
        self._at("batch")
        if self._count["batch"] == self._terminate:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_test_batch_end(self, batch, logs=None):
        self.tested.append([self._epoch, batch, logs["loss"]])
        self._at("validation")

    def on_epoch_end(self, epoch, logs=None):
        self._at("epoch")

    def get_state(self):
        return {"steps": self.steps, "tested": self.tested}

    def set_state(self, state):
        self.steps, self.tested = state["steps"], state["tested"]


class ScalarBoard(keras.callbacks.TensorBoard):
    """Has scalars written by `_scalar`, without TensorBoard."""

    @property
    def summary(self):
        return types.SimpleNamespace(
            scalar=self._scalar,
            record_if=tf.summary.record_if,
            create_file_writer=tf.summary.create_file_writer,
        )


class Board(ScalarBoard):
    """Writes scalars to a file."""

    def __init__(self, folder):
        super().__init__(folder + "-board", write_graph=False, update_freq=1)
        self._file = folder + "-board.txt"

    def _scalar(self, name, value, step):
        with open(self._file, "a") as file:
            file.write(f"{name} {int(tf.convert_to_tensor(step))}: ")
            file.write(f"{float(value)}\n")


class Lambda(keras.callbacks.Callback):
    """Its effect follows from the epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        random.random()
        np.random.rand()


CALLBACKS = {
    "stop": lambda folder: keras.callbacks.EarlyStopping(
        "val_loss", patience=1, restore_best_weights=True
    ),
    "plateau": lambda folder: keras.callbacks.ReduceLROnPlateau(
        "loss", patience=1, factor=0.5, min_delta=10.0, cooldown=1
    ),
    "schedule": lambda folder: keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: rate * 0.9
    ),
    "checkpoint": lambda folder: keras.callbacks.ModelCheckpoint(
        folder + "-best.weights.h5",
        save_best_only=True,
        save_weights_only=True,
    ),
    "csv": lambda folder: keras.callbacks.CSVLogger(folder + "-log.csv"),
    "append": lambda folder: keras.callbacks.CSVLogger(
        folder + "-append.csv", append=True
    ),
    "ema": lambda folder: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    "random": lambda folder: Lambda(),
    "accumulation": lambda folder: tfscale.callbacks.GradientAccumulation(3),
    "board": Board,
    "noise": lambda folder: tfscale.callbacks.GradientNoiseScale(0.9),
}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_saves(kill):
    """Numbers all that is done to files; dies before the one that is asked."""
    if kill is None or kill.split()[0] not in ("save", "restore"):
        return
    if kill == "restore":
        LocalStorage.read = lambda *args: die()
        return
    count = 0

    def numbered(function):
        def call(*args):
            nonlocal count
            count += 1
            if kill == f"save {count}":
                die()
            return function(*args)

        return call

    for name in ("make_folder", "flush", "write", "remove_file"):
        setattr(LocalStorage, name, numbered(getattr(LocalStorage, name)))


def digest(arrays):
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()
