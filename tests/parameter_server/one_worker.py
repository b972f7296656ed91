"""Run in a cluster with one worker: each training has one device's numbers.

`python -m tests.parameter_server.one_worker FOLDER`, by one_worker_test.py.
"""

import json
import os
import sys
import warnings

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests import same_numbers

STEPS = 6
_RANDOM = np.random.RandomState(0)
X = _RANDOM.normal(size=(40, 8)).astype("float32")
Y = X[:, :4].argmax(1)
TOKENS = _RANDOM.randint(0, 7, size=(40, 6))
TOKENS[:, :3] = 2  # many times in each batch


def layers():
    """All that a layer may change or add in a step."""
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(
                6, "relu", kernel_regularizer="l2", activity_regularizer="l1"
            ),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(4, kernel_constraint="unit_norm"),
        ]
    )


class OwnStep(keras.Model):
    """A model with a step of its own, which counts."""

    def build(self, input_shape):
        self.dense = keras.layers.Dense(4)
        self.dense.build(input_shape)
        self.count = self.add_weight(
            shape=(), dtype="int32", trainable=False, initializer="zeros"
        )
        self.built = True

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        self.count.assign(self.count + 2)
        return super().train_step(data)


def own_step():
    model = OwnStep(name="own_step")
    model.build((None, 8))
    return model


def embeddings():
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(7, 4),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(4),
        ]
    )


def sharded():
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            tfscale.layers.ShardedEmbedding(
                7, 4, num_shards=2, mask_zero=True, name="sharded"
            ),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(4),
        ]
    )


# name: model, inputs, optimizer
ROWS = {
    "layers": (
        layers,
        X,
        lambda: keras.optimizers.AdamW(
            keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.5),
            global_clipnorm=0.5,
        ),
    ),
    "own_step": (
        own_step,
        X,
        lambda: keras.optimizers.Nadam(0.02, use_ema=True, clipnorm=0.1),
    ),
    "embeddings": (
        embeddings,
        TOKENS,
        lambda: keras.optimizers.Adam(0.02, global_clipnorm=0.05),
    ),
    "sharded": (
        sharded,
        TOKENS,
        lambda: keras.optimizers.Adam(0.02, global_clipnorm=0.05),
    ),
}


def dataset(x):
    data = tf.data.Dataset.from_tensor_slices((x, Y, np.abs(X[:, 0])))
    return data.repeat().batch(16)


def compiled(model, optimizer):
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
    return model


def outcome(model, inner, x, row):
    """What comes of a training, under names."""
    validation = {}
    if row == "layers":
        validation = {
            "validation_data": (x[:37], Y[:37]),
            "validation_batch_size": 8,
        }
    fit = model.fit(
        dataset(x),
        epochs=2,
        steps_per_epoch=STEPS,
        shuffle=False,
        verbose=0,
        **validation,
    )
    found = {f"log {name}": value for name, value in fit.history.items()}
    if row == "layers":
        found |= {
            "evaluated": model.evaluate(
                x[:37], Y[:37], batch_size=10, verbose=0
            ),
            "predicted": model.predict(x[:37], batch_size=10, verbose=0),
            # They were four batches: a worker is given two at a time.
            "predicted steps": model.predict(dataset(x), steps=3, verbose=0),
            "on_batch": model.train_on_batch(x[:16], Y[:16]),
            "predicted_on_batch": model.predict_on_batch(x[:3]),
        }
    found |= {v.path: np.array(v.numpy()) for v in inner.variables}
    return found | {
        v.path: np.array(v.numpy()) for v in model.optimizer.variables
    }


def compare(strategy, row):
    """How far each thing is from that of one device, and where it lies."""
    build, x, make_optimizer = ROWS[row]
    same_numbers.reset()
    plain = build()
    optimizer = same_numbers.with_dense_gradients(make_optimizer())
    optimizer.build(plain.trainable_variables)
    expected = outcome(compiled(plain, optimizer), plain, x, row)
    same_numbers.reset()
    with strategy.scope():
        inner = build()
        model = tfscale.ParameterServerModel(inner)
        compiled(model, make_optimizer())
    actual = outcome(model, inner, x, row)
    variables = [*inner.variables, *model.optimizer.variables]
    variables += [v for m in model.metrics for v in m.variables]
    file = os.path.join(sys.argv[1], f"{row}.keras")
    model.save(file)
    saved = keras.saving.load_model(file, {"OwnStep": OwnStep}, compile=False)
    return {
        "names": sorted(expected) == sorted(actual),
        "differences": {
            name: difference(value, actual[name])
            for name, value in expected.items()
        },
        "shards": [
            v.value.device for v in variables if "sharded" in v.path
        ],
        "devices": sorted({v.value.device for v in variables}),
        "iterations": int(model.optimizer.iterations.numpy()),
        "saved": [type(saved).__name__, max(
            difference(v, w) for v, w in zip(inner.weights, saved.weights)
        )],
    }  # fmt: skip


def difference(expected, actual):
    """Relative to the largest entry."""
    expected = np.asarray(expected, "float64")
    largest = np.abs(expected).max() or 1.0
    return float(np.abs(np.asarray(actual) - expected).max() / largest)


def errors(strategy, old):
    """What is said of what cannot be trained."""
    with strategy.scope():
        inner = own_step()
        model = compiled(tfscale.ParameterServerModel(inner), "sgd")
        foreign = keras.optimizers.SGD
    outside = own_step()
    optimizer = keras.optimizers.SGD()
    filtered = tf.data.Dataset.from_tensor_slices((X, Y))
    filtered = filtered.filter(lambda x, y: True).batch(16)

    def inside(function, *args, **kwargs):
        def call():
            with strategy.scope():
                return function(*args, **kwargs)

        return call

    def one_at_a_time(**kwargs):
        return inside(model.compile, foreign(**kwargs), "mse")

    def fit(x, **kwargs):
        return lambda: model.fit(x, verbose=0, **kwargs)

    class Largest(keras.Metric):
        def __init__(self, name):
            super().__init__(name=name)
            self.largest = self.add_weight(shape=(), initializer="zeros")

        def reset_state(self):
            self.largest.assign(-1.0)

        def update_state(self, y, y_pred, sample_weight=None):
            self.largest.assign(keras.ops.max(y_pred))

        def result(self):
            return self.largest * 1

    def with_metric():
        with strategy.scope():
            one = tfscale.ParameterServerModel(own_step())
            one.compile("sgd", metrics=[Largest(name="largest")])
        one.fit(dataset(X), steps_per_epoch=1, verbose=0)

    class Logs(keras.Model):
        def train_step(self, data):
            return {**super().train_step(data), "mine": 1.0}

    def with_other_logs():
        inputs = keras.Input((8,))
        with strategy.scope():
            outputs = keras.layers.Dense(4)(inputs)
            one = tfscale.ParameterServerModel(Logs(inputs, outputs))
            compiled(one, "sgd")
        with warnings.catch_warnings(record=True) as said:
            one.fit(dataset(X), steps_per_epoch=1, verbose=0)
        raise ValueError(*(each.message for each in said))

    def sharded_and_clipped():
        optimizer = keras.optimizers.SGD(clipnorm=1.0)
        compiled(tfscale.ParameterServerModel(sharded()), optimizer)

    def quantized_later(method, *args, **kwargs):
        # What had been traced went on with the float weights.
        with strategy.scope():
            inner = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
            one = compiled(tfscale.ParameterServerModel(inner), "sgd")
        getattr(one, method)(*args, verbose=0, **kwargs)
        with strategy.scope():
            inner.quantize("int8")
        getattr(one, method)(*args, verbose=0, **kwargs)

    cases = {
        "outside": lambda: tfscale.ParameterServerModel(outside),
        "made outside": inside(tfscale.ParameterServerModel, outside),
        "twice": inside(tfscale.ParameterServerModel, model),
        "not built": inside(tfscale.ParameterServerModel, keras.Sequential([])),
        "compiled outside": lambda: model.compile("sgd", "mse"),
        "foreign optimizer": inside(model.compile, optimizer, "mse"),
        "eager": inside(model.compile, "sgd", "mse", run_eagerly=True),
        "xla": inside(model.compile, "sgd", "mse", jit_compile=True),
        "accumulates": one_at_a_time(gradient_accumulation_steps=2),
        "overwrites": one_at_a_time(use_ema=True, ema_overwrite_frequency=5),
        "scales": inside(
            lambda: model.compile(
                keras.optimizers.LossScaleOptimizer(foreign()), "mse"
            )
        ),
        "arrays": fit(X, y=Y),
        "callback": fit(
            dataset(X),
            steps_per_epoch=2,
            callbacks=[tfscale.callbacks.GradientAccumulation(2)],
        ),
        "no steps": fit(dataset(X)),
        "worker": fit(
            dataset(X).map(
                lambda x, y, w: (tf.debugging.check_numerics(x / 0.0, "x"), y)
            ),
            steps_per_epoch=1,
        ),
        "ends": fit(dataset(X).take(3), steps_per_epoch=5),
        "ends unknown": fit(filtered, steps_per_epoch=5),
        "old": lambda: model.evaluate(old, steps=2, verbose=0),
        "metric": with_metric,
        "other logs": with_other_logs,
        "clips shards": inside(sharded_and_clipped),
        "quantized fit": lambda: quantized_later(
            "fit", dataset(X), steps_per_epoch=1
        ),
        "quantized predict": lambda: quantized_later("predict", X),
        "quantized": inside(model.quantize, "int8"),
        "pipeline": inside(tfscale.PipelineModel, inner, 2),
    }
    found = {}
    for name, case in cases.items():
        if name == "arrays":  # Those before have compiled it.
            with strategy.scope():
                compiled(model, "sgd")
        try:
            case()
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    # After all of that it trains.
    history = model.fit(dataset(X), steps_per_epoch=2, verbose=0)
    found["after"] = list(history.history)
    return found


def main():
    # With one thread a server waited for itself, for ever.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tfscale.initialize()
    old = dataset(X)
    strategy = tfscale.ParameterServerStrategy()
    results = {row: compare(strategy, row) for row in ROWS}
    results["errors"] = errors(strategy, old)
    with open(os.path.join(sys.argv[1], "results.json"), "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
