"""Trains in the workers of a Ray cluster, by Ray Train.

    pip install -e ".[ray]"
    python -m examples.cluster.ray_train --num_workers=2 --gpus_per_worker=4

`TensorflowTrainer` starts the workers where there are devices and writes
`TF_CONFIG`; `tfscale.initialize()` in each of them does the rest. After a
worker is lost Ray starts all again (`--max_failures`), and BackupAndRestore
continues the run from `--storage`, a folder that all machines see.
"""

import os

from absl import app
from absl import flags

NUM_WORKERS = flags.DEFINE_integer(
    "num_workers", 2, "Processes.", lower_bound=1
)
GPUS_PER_WORKER = flags.DEFINE_integer(
    "gpus_per_worker", 0, "0 for a CPU core each.", lower_bound=0
)
MAX_FAILURES = flags.DEFINE_integer(
    "max_failures", 3, "How often to start again.", lower_bound=0
)
NUM_EPOCHS = flags.DEFINE_integer("num_epochs", 3, "Epochs.", lower_bound=1)
ADDRESS = flags.DEFINE_string(
    "address", None, "Ray cluster to join. By default one of this machine."
)
STORAGE = flags.DEFINE_string(
    "storage", "ray_results", "Folder of results and backups."
)


def train(config):
    """What each worker runs.

    Args:
        config: Dict with the "folder" of the backups, "num_replicas" (of all
            workers) and "num_epochs".
    """
    # Ray asks for Keras 2, which is another package.
    os.environ.pop("TF_USE_LEGACY_KERAS", None)
    import keras

    import tfscale
    from examples import mlp

    tfscale.initialize()
    strategy = tfscale.MeshStrategy(
        tfscale.device_mesh(data=config["num_replicas"])
    )
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = mlp.build(64)
        model.compile("adam", mlp.hard_loss(), metrics=["accuracy"])
    history = model.fit(
        *mlp.clusters(1024, seed=0),
        batch_size=32,
        epochs=config["num_epochs"],
        verbose=2 if strategy.is_chief else 0,
        callbacks=[tfscale.callbacks.BackupAndRestore(config["folder"])],
    )
    if strategy.is_chief:
        print(f"Loss: {history.history['loss'][-1]:.4f}")


def main(argv):
    del argv
    try:
        import ray
        from ray.train.tensorflow import TensorflowTrainer
    except ImportError as error:
        raise app.UsageError(
            "This example needs Ray Train. Install it with "
            '`pip install -e ".[ray]"`.'
        ) from error
    ray.init(address=ADDRESS.value)
    storage = os.path.abspath(STORAGE.value)
    trainer = TensorflowTrainer(
        train,
        train_loop_config={
            "folder": os.path.join(storage, "backups"),
            "num_epochs": NUM_EPOCHS.value,
            "num_replicas": NUM_WORKERS.value * max(GPUS_PER_WORKER.value, 1),
        },
        scaling_config=ray.train.ScalingConfig(
            num_workers=NUM_WORKERS.value,
            use_gpu=GPUS_PER_WORKER.value > 0,
            resources_per_worker=(
                {"GPU": GPUS_PER_WORKER.value}
                if GPUS_PER_WORKER.value
                else {"CPU": 1}
            ),
        ),
        run_config=ray.train.RunConfig(
            storage_path=storage,
            failure_config=ray.train.FailureConfig(
                max_failures=MAX_FAILURES.value
            ),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    app.run(main)
