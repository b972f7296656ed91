"""Federated averaging: weights travel, the data of a client stays with it.

    python -m examples.train_federated --flagfile=configs/federated.flags
    python -m tfscale.launch --num_workers=3 -m examples.train_federated \
        --flagfile=configs/federated.flags

In each round every client trains the common weights on its own rows, of which
some have more and each has others; the next common weights are the mean, each
client counting by its rows (McMahan et al. 2017, algorithm 1). With one step on
all rows of a client that is a step of SGD on all data. Clients may drop out of
a round. Started by the launcher, each process is a client, and its rows never
leave it; without it they take turns, on the mesh of the flags.

Weights are averaged, and statistics of BatchNormalization; slots of an
optimizer begin anew in each round. For real devices an engine such as Flower
calls the same three methods: `get_weights`, `fit`, `set_weights`.
"""

import os
import zlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

import tfscale
from examples import finite_float
from examples import mlp
from tfscale.cluster import cluster_from_environment

flags.adopt_module_key_flags(mlp)

NUM_CLIENTS = flags.DEFINE_integer(
    "num_clients", 3, "Clients that take turns.", lower_bound=1
)
NUM_ROUNDS = flags.DEFINE_integer(
    "num_rounds", 5, "Times to average.", lower_bound=1
)
DROPOUT = finite_float.define(
    "dropout",
    0.0,
    "Share of the clients that a round loses.",
    lower_bound=0.0,
    upper_bound=0.9,
)
LOCAL_LEARNING_RATE = finite_float.define(
    "local_learning_rate", 0.1, "Of the clients' SGD.", lower_bound=0.0
)
WIDTH = flags.DEFINE_integer("width", 32, "Neurons of a layer.", lower_bound=8)
ONE_STEP = flags.DEFINE_boolean(
    "one_step", False, "One step on all rows of a client, which is SGD."
)


def rows_of(client):
    """The rows of a client; of no other."""
    x, y = mlp.clusters(
        mlp.NUM_ROWS.value // 4 * (client + 1), mlp.SEED.value + 10 + client
    )
    return x + 0.1 * client, y


def takes_part(client, number):
    """Whether a client is there in a round, the same for all who ask."""
    draw = np.random.default_rng([mlp.SEED.value, client, number]).random()
    return draw >= DROPOUT.value


def build(strategy):
    """The model of a client, the same for each."""
    with strategy.scope():
        keras.utils.set_random_seed(mlp.SEED.value)
        model = mlp.in_stages(mlp.build(WIDTH.value))
        model.compile(
            keras.optimizers.SGD(LOCAL_LEARNING_RATE.value),
            mlp.hard_loss(),
        )
    return model


def values(model):
    """The weights, whole wherever they are."""
    return [keras.ops.convert_to_numpy(v) for v in model.weights]


def local_round(strategy, weights, x, y):
    """The weights of a client after it has trained."""
    model = build(strategy)
    for variable, value in zip(model.weights, weights):
        variable.assign(value)
    model.fit(
        x,
        y,
        batch_size=len(x) if ONE_STEP.value else mlp.BATCH_SIZE.value,
        epochs=1 if ONE_STEP.value else mlp.NUM_EPOCHS.value,
        shuffle=not ONE_STEP.value,
        verbose=0,
    )
    return values(model)


def average(parts, sizes):
    """The mean of weights, each client counting by its rows."""
    return [
        sum(size * part for size, part in zip(sizes, of_clients)) / sum(sizes)
        for of_clients in zip(*parts)
    ]


def fingerprint(weights):
    """A number of the shapes of weights, in their order."""
    return zlib.crc32(repr([value.shape for value in weights]).encode())


def check_fingerprints(found):
    """Refuses clients whose weights have no mean.

    Raises:
        ValueError: If the fingerprints of the clients are not the same.
    """
    others = [client for client, x in enumerate(found) if x != found[0]]
    if others:
        raise ValueError(
            "All clients must have the same model. Received: weights of other "
            f"shapes in clients {others} than in client 0. Start all of them "
            "with the same flags."
        )


def take_turns(strategy):
    """The rounds of all clients in this process; yields common weights."""
    weights = values(build(strategy))
    for number in range(NUM_ROUNDS.value):
        here = [c for c in range(NUM_CLIENTS.value) if takes_part(c, number)]
        data = [rows_of(client) for client in here]
        parts = [local_round(strategy, weights, x, y) for x, y in data]
        if parts:
            weights = average(parts, [len(x) for x, _ in data])
        yield weights


def be_a_client():
    """The rounds of the client that this process is."""
    tfscale.initialize()
    num_clients = len(cluster_from_environment().jobs["worker"])
    client = cluster_from_environment().index
    sums = tfscale.MeshStrategy(tfscale.device_mesh(data=num_clients))
    alone = tf.distribute.get_strategy()
    x, y = rows_of(client)
    weights = values(build(alone))

    @tf.function
    def sum_over_clients(tensors):
        def add():
            return tf.distribute.get_replica_context().all_reduce(
                "SUM", tensors
            )

        return sums.run(add)

    # Sums of tensors of different shapes would hang: this is asked first.
    own = np.zeros(num_clients, "int64")
    own[client] = fingerprint(weights)
    [found] = sum_over_clients([tf.constant(own)])
    check_fingerprints(found.numpy().tolist())
    for number in range(NUM_ROUNDS.value):
        size = len(x) if takes_part(client, number) else 0
        part = weights
        if size:
            part = local_round(alone, weights, x, y)
        *totals, rows = sum_over_clients(
            [tf.constant(size * value) for value in part]
            + [tf.constant(float(size))]
        )
        if rows:
            weights = [(total / rows).numpy() for total in totals]
        yield weights


def main(argv):
    del argv
    is_client = cluster_from_environment() is not None
    rounds = be_a_client() if is_client else take_turns(mlp.make_strategy())
    test = mlp.clusters(1024, mlp.SEED.value)
    for number, weights in enumerate(rounds):
        plain = mlp.build(WIDTH.value)
        plain.set_weights(weights)
        logits = keras.ops.convert_to_numpy(plain(test[0]))
        found = np.mean(logits.argmax(-1) == test[1])
        total = sum(float(np.abs(value).sum()) for value in weights)
        print(f"round {number}: accuracy {found:.3f}, sum {total:.6f}")


if __name__ == "__main__":
    app.run(main)
