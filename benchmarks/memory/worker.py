"""Memory of one configuration in a process of its own, as JSON.

    TF_ENABLE_ONEDNN_OPTS=1 python -m benchmarks.memory.worker '{"data": 2}'

A stack of `Dense` layers, with `"gpt": true` a GPT whose head is its table of
tokens, or a `"backbone"` of keras_hub with a head, trains with Adam on virtual
CPU devices, or with `"device": "GPU"` on GPUs, of which the first is measured.
TensorFlow counts what its tensors take, one sum for all devices, where its
allocator is oneDNN's or BFC; resident memory and malloc say nothing of it.
Small tensors (less than 256 KiB) are not counted. Bytes come as multiples of P,
those of all weights once. `tfscale.plan` plans the peak, and of a pipeline
`pipeline_summary` predicts it.
"""

import json
import os
import statistics
import sys
import tempfile
import time

import keras
import keras_hub
import numpy as np
import tensorflow as tf

import tfscale
from tfscale.pipeline.stages.memory import stage_memory
from tfscale.planner.cost import Settings

_LENGTH = 16  # Tokens of a row.
_THREADS = 2  # Of CPUs: as many operations run at once.
DEFAULTS = {
    "device": "CPU",
    "data": 1,
    "pipeline": 1,
    "model": 1,
    "zero_stage": 0,
    "offload": None,
    "sequence_parallel": False,
    "gpt": False,
    "backbone": None,
    "vocabulary": 8000,
    "length": _LENGTH,
    "num_microbatches": 8,
    "schedule": "1f1b",
    "recompute": False,
    "accumulate": 1,
    "depth": 12,
    "width": 1024,
    "batch": 16,
    "steps": 6,
    "optimizer": {},
    "loss_scale": False,
    "restore": False,
}


class Peaks(keras.callbacks.Callback):
    """Notes the peak, the processor time and the time of each batch."""

    def __init__(self, device):
        super().__init__()
        self._device = device
        self.peaks, self.times, self.clock = [], [], []

    def _begin(self, batch, logs=None):
        tf.config.experimental.reset_memory_stats(self._device)
        self._start = time.process_time(), time.perf_counter()

    def _end(self, batch, logs=None):
        self.times.append(time.process_time() - self._start[0])
        self.clock.append(time.perf_counter() - self._start[1])
        self.peaks.append(_memory(self._device, "peak"))

    on_train_batch_begin = on_test_batch_begin = _begin
    on_train_batch_end = on_test_batch_end = _end


def _memory(device, kind):
    return tf.config.experimental.get_memory_info(device)[kind]


def make_model(config):
    """The model of a configuration, compiled."""
    model = build_model(config)
    if config["pipeline"] > 1:
        model = tfscale.PipelineModel(
            model,
            config["num_microbatches"],
            schedule=config["schedule"],
            recompute=config["recompute"],
        )
    optimizer = keras.optimizers.Adam(1e-3, **config["optimizer"])
    if config["loss_scale"]:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    loss = "mse"
    if config["gpt"] or config["backbone"]:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    return model


def build_model(config):
    """The model of a configuration."""
    if config["backbone"]:
        return _with_head(config)
    return _gpt(config) if config["gpt"] else _dense(config)


def _with_head(config):
    """Llama or BERT, which predicts tokens."""
    width, size = config["width"], config["vocabulary"]
    options = {
        "vocabulary_size": size,
        "num_layers": config["depth"],
        "hidden_dim": width,
    }
    if config["backbone"] == "llama":
        backbone = keras_hub.models.LlamaBackbone(
            num_query_heads=8,
            num_key_value_heads=8,
            intermediate_dim=3 * width,
            **options,
        )
        # It has a second table for this.
        outputs = backbone.token_embedding(backbone.output, reverse=True)
    else:
        backbone = keras_hub.models.BertBackbone(
            num_heads=8,
            intermediate_dim=4 * width,
            max_sequence_length=config["length"],
            **options,
        )
        outputs = keras.layers.Dense(size)(backbone.output["sequence_output"])
    return keras.Model(backbone.inputs, outputs)


def _dense(config):
    x = inputs = keras.Input((config["width"],))
    for number in range(config["depth"]):
        layer = keras.layers.Dense(
            config["width"], "relu", name=f"dense_{number}"
        )
        x = layer(x)
    return keras.Model(inputs, x)


def _gpt(config):
    """Blocks of `width` features, and 8 times as many tokens."""
    width, layers = config["width"], keras.layers
    table = layers.ReversibleEmbedding(8 * width, width, name="table")
    inputs = keras.Input((_LENGTH,), dtype="int32")
    x = table(inputs)
    for _ in range(config["depth"]):
        h = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(8, width // 8, use_bias=False)
        x = x + attention(h, h, use_causal_mask=True)
        h = layers.LayerNormalization()(x)
        x = x + layers.Dense(width)(layers.Dense(4 * width, "gelu")(h))
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, table(x, reverse=True))


def make_batch(config):
    """What one step is given, of all replicas."""
    rows, random = config["data"] * config["batch"], np.random.default_rng(0)
    if config["backbone"]:
        shape = rows, config["length"]
        x = random.integers(0, config["vocabulary"], shape)
        inputs = {"token_ids": x, "padding_mask": np.ones(shape, "int32")}
        if config["backbone"] == "bert":
            inputs["segment_ids"] = np.zeros(shape, "int32")
        return tf.data.Dataset.from_tensors((inputs, x))
    if config["gpt"]:
        x = random.integers(0, 8 * config["width"], (rows, _LENGTH))
    else:
        x = random.normal(size=(rows, config["width"])).astype("float32")
    return tf.data.Dataset.from_tensors((x, x))


def layout_map(config, mesh):
    """A transformer's own; else layers by their outputs and inputs in turn."""
    if config["model"] == 1:
        return None
    if config["gpt"] or config["backbone"]:
        return tfscale.auto_layout_map(lambda: build_model(config), mesh)
    return {
        ".*dense_\\d*[02468]/kernel": (None, "model"),
        ".*dense_\\d*[02468]/bias": ("model",),
        ".*dense_\\d*[13579]/kernel": ("model", None),
    }


def planned(config):
    """Bytes of all devices as `tfscale.plan` has them, or NaN without one."""
    axes = {axis: config[axis] for axis in ("data", "pipeline", "model")}
    pipelined = {
        key: config[key]
        for key in ("num_microbatches", "schedule", "recompute")
    }
    settings = Settings(
        **axes,
        zero_stage=config["zero_stage"],
        sequence_parallel=config["sequence_parallel"],
        **(pipelined if config["pipeline"] > 1 else {}),
    )
    plans = tfscale.plan(
        lambda: build_model(config),
        num_devices=settings.num_devices,
        batch_size=config["data"] * config["batch"],
        device="H100",
        length=config["length"],
    )
    return next(
        (
            plan.num_bytes * settings.num_devices
            for plan in plans
            if plan.settings == settings
        ),
        float("nan"),
    )


def measure(config):
    """Bytes at rest and at the peaks of a step and of `evaluate`, in P."""
    sizes = {axis: config[axis] for axis in ("data", "pipeline", "model")}
    count = int(np.prod(list(sizes.values())))
    devices = [f"{config['device']}:{number}" for number in range(count)]
    if config["device"] == "CPU":
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(_THREADS)
        tfscale.use_virtual_devices(count)
    keras.utils.set_random_seed(0)
    before = _memory(devices[0], "current")
    mesh = tfscale.device_mesh(**sizes, devices=devices)
    strategy = tfscale.MeshStrategy(
        mesh,
        layout_map(config, mesh),
        zero_stage=config["zero_stage"],
        offload=config["offload"],
        sequence_parallel=config["sequence_parallel"],
    )
    with strategy.scope():
        model = make_model(config)
    batch = make_batch(config)
    callbacks = []
    if config["accumulate"] > 1:
        callbacks = [
            tfscale.callbacks.GradientAccumulation(config["accumulate"])
        ]
    model.fit(batch.repeat(2), verbose=0, callbacks=callbacks)
    if config["restore"]:
        with tempfile.TemporaryDirectory() as folder:
            state = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
            state.restore(state.save(os.path.join(folder, "state")))
    trained, evaluated = Peaks(devices[0]), Peaks(devices[0])
    model.fit(
        batch.repeat(config["steps"]),
        verbose=0,
        callbacks=[*callbacks, trained],
    )
    model.evaluate(batch, verbose=0)
    model.evaluate(batch.repeat(3), verbose=0, callbacks=[evaluated])
    rest = _memory(devices[0], "current")
    weights = 4 * sum(np.prod(v.shape) for v in model.trainable_variables)
    predicted = float("nan")
    if config["pipeline"] > 1:
        rows = config["batch"] // config["num_microbatches"]
        stages = stage_memory(model._plan, rows)
        working = sorted(stage.working for stage in stages)
        if config["device"] == "CPU":
            # A thread runs one backward at a time, of whatever device.
            working = working[-_THREADS:]
        predicted = sum(stage.total - stage.working for stage in stages)
        # And the batch, x and y.
        predicted += sum(working) + 2 * 4 * config["batch"] * config["width"]
        predicted /= weights
    # Which operations happen to run at once differs from step to step.
    return {
        "rest": (rest - before) / weights,
        "step": (min(trained.peaks[1:]) - before) / weights,
        "typical_step": (statistics.median(trained.peaks[1:]) - before)
        / weights,
        "largest_step": (max(trained.peaks[1:]) - before) / weights,
        "predicted": predicted,
        "planned": planned(config) / weights,
        "evaluate": (min(evaluated.peaks) - before) / weights,
        "processor": statistics.median(trained.times[1:]),
        "clock": statistics.median(trained.clock[1:]),
        "bytes": int(weights),
    }


if __name__ == "__main__":
    print(json.dumps(measure({**DEFAULTS, **json.loads(sys.argv[1])})))
