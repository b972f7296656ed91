"""Run in a cluster with two workers, which are killed: both, and then one.

`python -m tests.parameter_server.two_workers FOLDER`, by two_workers_test.py,
which has a second one of each in reserve:

    worker 0   trains ── killed    (again) ── trains ────────── trains
    worker 1   trains ── killed    (again) ── trains ── killed
    ps 0       ............................................ killed
"""

import json
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfscale

STEPS = 30
_RANDOM = np.random.RandomState(0)
X = _RANDOM.normal(size=(200, 8)).astype("float32")
Y = X[:, :3].argmax(1)


class Count(keras.layers.Layer):
    """Counts the steps of training, as a seed generator counts draws."""

    def build(self, input_shape):
        self.count = self.add_weight(
            shape=(), dtype="int64", initializer="zeros", trainable=False
        )
        self.built = True

    def call(self, x, training=False):
        if training:
            self.count.assign(self.count + 1)
        return x


class Watch(keras.callbacks.Callback):
    """Notes what callbacks see, and kills processes at a step."""

    def __init__(self, *names):
        super().__init__()
        self.names, self.losses, self.ends = names, [], []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        if batch == 5:
            for pid in [pid_of(name) for name in self.names]:
                os.kill(pid, signal.SIGKILL)
            for name in self.names:
                let_come_back(name)
            self.names = []

    def on_epoch_end(self, epoch, logs=None):
        self.ends.append(int(self.model.optimizer.iterations.numpy()))


def pid_of(name):
    with open(os.path.join(sys.argv[1], f"{name}.pid")) as file:
        return int(file.read())


def let_come_back(name):
    """Has the one begin that is in reserve, if there is one."""
    open(os.path.join(sys.argv[1], f"{name}.spare"), "w").close()


def dataset():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(len(X))
    return data.repeat().batch(20)


def build(strategy):
    with strategy.scope():
        layers = [keras.Input((8,)), Count(), keras.layers.Dense(3)]
        model = tfscale.ParameterServerModel(keras.Sequential(layers))
        model.compile(
            keras.optimizers.Adam(0.05),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy", Rows()],
        )
    return model


class Rows(keras.metrics.Metric):
    """How many rows there were."""

    def __init__(self, name="rows"):
        super().__init__(name=name)
        self.rows = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y, y_pred, sample_weight=None):
        self.rows.assign_add(tf.cast(tf.shape(y)[0], "float32"))

    def result(self):
        return self.rows * 1.0


class Seen(keras.metrics.Metric):
    """How often each batch was trained on."""

    def __init__(self, name="seen"):
        super().__init__(name=name)
        self.seen = self.add_weight(shape=(2 * STEPS,), initializer="zeros")

    def update_state(self, y, y_pred, sample_weight=None):
        self.seen.assign_add(keras.ops.sum(y, axis=0))

    def result(self):
        return keras.ops.max(self.seen)


def batches(strategy):
    """The most often that one batch was trained on, dealt out in two ways."""
    with strategy.scope():
        inner = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model = tfscale.ParameterServerModel(inner)
        model.compile("sgd", "mse", metrics=[Seen()])

    def numbered(data):
        return data.map(
            lambda n: (tf.ones((1, 1)), tf.one_hot([n], 2 * STEPS))
        ).repeat()

    contexts = []

    def of_worker(context):
        contexts.append(
            [context.num_input_pipelines, context.input_pipeline_id]
        )
        data = tf.data.Dataset.range(2 * STEPS)
        return numbered(data.shard(*contexts[-1]))

    found = [
        model.fit(data, steps_per_epoch=STEPS, verbose=0).history["seen"][0]
        for data in (numbered(tf.data.Dataset.range(2 * STEPS)), of_worker)
    ]
    return {"most": found, "contexts": contexts}


def wait_for_worker(index, seconds=60.0):
    """Until TensorFlow has taken it in again."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with tf.device(f"/job:worker/replica:0/task:{index}"):
                return int(tf.constant(1) + 1) == 2
        except tf.errors.OpError:
            time.sleep(0.1)
    return False


def main():
    tfscale.initialize()
    strategy = tfscale.ParameterServerStrategy()
    model = build(strategy)
    results = {}

    def fit(epochs, *killed):
        watch = Watch(*killed)
        history = model.fit(
            dataset(),
            steps_per_epoch=STEPS,
            epochs=epochs,
            verbose=0,
            callbacks=[watch],
        )
        return {
            **history.history,
            "iterations": watch.ends,
            "of steps": watch.losses,
            "counted": int(model.layers[0].count.numpy()),
        }

    results["both"] = fit(3)
    results["batches"] = batches(strategy)
    # Each batch counts once, and predictions come in order.
    plain = keras.Sequential.from_config(
        model.model.get_config(), custom_objects={"Count": Count}
    )
    plain.set_weights(model.get_weights())
    plain.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", Rows()],
    )
    results["evaluated"] = [
        one.evaluate(X, Y, batch_size=30, verbose=0) for one in (plain, model)
    ]
    results["predicted"] = float(
        np.abs(
            model.predict(X, batch_size=7, verbose=0)
            - plain.predict(X, batch_size=30, verbose=0)
        ).max()
    )
    results["both are killed"] = fit(2, "worker0", "worker1")
    results["they come back"] = [wait_for_worker(0), wait_for_worker(1)]
    # From here on it is gone for good.
    results["one is killed"] = fit(2, "worker1")
    results["after"] = model.evaluate(X, Y, verbose=0)
    start = time.monotonic()
    try:
        fit(2, "ps0")
    except Exception as error:
        results["server"] = f"{type(error).__name__}: {error}"
    results["seconds"] = time.monotonic() - start
    with open(os.path.join(sys.argv[1], "results.json"), "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
