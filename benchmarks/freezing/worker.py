"""Trains one kind of step; a line that comes in is a turn of some steps."""

import json
import statistics
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfscale
from benchmarks.step_clock import StepClock
from examples import distillation

LAYERS = 24


def main():
    config = json.loads(sys.argv[1])
    kind = config["kind"]
    stages = 2 if kind.startswith("2 stages") else 1
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(stages)
    tfscale.use_virtual_devices(stages)
    keras.config.disable_interactive_logging()
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2, config["batch"], config["width"])).astype(
        "float32"
    )
    make = _distilled if "student" in kind or "teacher" in kind else _frozen
    model, data = make(config, x, y)
    batches = tf.data.Dataset.from_tensors(data).repeat()

    def fit(steps):
        clock = StepClock()
        model.fit(batches, steps_per_epoch=steps, verbose=0, callbacks=[clock])
        return clock.times

    fit(2)
    for _ in sys.stdin:
        start = time.process_time()
        times = fit(config["steps"])
        seconds = time.process_time() - start
        print(
            json.dumps(
                {
                    "processor": seconds / config["steps"],
                    "clock": statistics.median(times),
                }
            ),
            flush=True,
        )


def _mlp(width, num_layers, prefix="d"):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(width, "tanh", name=f"{prefix}{i}")
        for i in range(num_layers)
    ]
    name = f"{prefix}_layers"
    return keras.Sequential([keras.Input((width,)), *layers], name=name)


def _frozen(config, x, y):
    """The first half of the layers is frozen, but for the base."""
    kind, width = config["kind"], config["width"]
    middle = f"d{LAYERS // 2}"
    strategy = tf.distribute.get_strategy()
    if kind.startswith("2 stages"):
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
    with strategy.scope():
        model = _mlp(width, LAYERS)
        if kind != "all trainable":
            for layer in model.layers[: LAYERS // 2]:
                layer.trainable = False
        if kind == "cached activations":
            prefix, model = tfscale.cut(model, middle)
            x = prefix.predict(x, verbose=0)
        if kind.startswith("2 stages"):
            balance = [middle] if "halves" in kind else "flops"
            model = tfscale.PipelineModel(
                model, config["microbatches"], balance=balance
            )
        model.compile("adam", "mse")
    return model, (x, y)


def _distilled(config, x, y):
    """A student of 8 layers and a teacher of 24."""
    kind, width = config["kind"], config["width"]
    student = _mlp(width, 8, "student")
    teacher = _mlp(width, LAYERS, "teacher")
    labels = y.argmax(-1)
    losses = distillation.losses()
    if kind == "student":
        student.compile("adam", losses["loss"]["hard"])
        return student, (x, labels)
    if "logits" in kind:
        soft = teacher.predict(x, verbose=0)
        model = distillation.with_logits(student)
    else:
        soft = labels
        model = distillation.with_teachers(student, [teacher])
    model.compile("adam", **losses)
    return model, (x, {"hard": labels, "soft": soft})


if __name__ == "__main__":
    main()
