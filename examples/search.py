"""Searches a learning rate and a width, by Ray Tune on groups of devices.

    pip install -e ".[ray]"
    python -m examples.search --flagfile=configs/search.flags

A trial is a process with devices of its own and a mesh over them. As many run
at once as there are devices for. ASHA (Li et al., "A System for Massively
Parallel Hyperparameter Tuning", 2020) stops those that fall behind, and the
next trial starts on their devices. Start the program again after a kill, and
the trials continue at the last epoch that they saved. With `--address=auto` the
devices are those of a Ray cluster, and `--storage` is a folder that all of its
machines see.
"""

import functools
import json
import os
import time

from absl import app
from absl import flags

from examples import mlp

NUM_TRIALS = flags.DEFINE_integer(
    "num_trials", 8, "Options to try.", lower_bound=1
)
WIDTHS = flags.DEFINE_list("widths", ["32", "64", "128"], "Widths to try.")
MAX_CONCURRENT = flags.DEFINE_integer(
    "max_concurrent", 0, "Trials at a time; 0: all that have devices."
)
MIN_EPOCHS = flags.DEFINE_integer(
    "min_epochs", 2, "Epochs before a trial may be stopped.", lower_bound=1
)
ADDRESS = flags.DEFINE_string(
    "address", None, "Ray cluster to join. By default one of this machine."
)
STORAGE = flags.DEFINE_string(
    "storage", "search_results", "Folder of results and backups."
)
NAME = flags.DEFINE_string("name", "search", "Name of this search.")
# Ray takes up to minutes to end the trials of a driver that was killed.
SECONDS_TO_END = 180.0
USE_GPUS = flags.DEFINE_bool("gpus", False, "Whether devices are GPUs.")


def train(config, flag_lines, storage):
    """A trial: trains one option on the devices of this process.

    Args:
        config: Dict with "learning_rate" and "width", drawn by Tune.
        flag_lines: Flags of the program, which this process has not parsed.
        storage: Folder of the backups of all trials.
    """
    import keras
    from ray import tune

    import tfscale

    flags.FLAGS(["search", *flag_lines], known_only=True)
    strategy = mlp.make_strategy()
    keras.utils.set_random_seed(mlp.SEED.value)
    with strategy.scope():
        model = mlp.in_stages(mlp.build(config["width"]))
        model.compile(
            keras.optimizers.Adam(config["learning_rate"]),
            mlp.hard_loss(),
            metrics=["accuracy"],
        )
    backups = os.path.join(storage, tune.get_context().get_trial_id())
    fit = functools.partial(
        model.fit,
        *mlp.clusters(mlp.NUM_ROWS.value, seed=0),
        validation_data=mlp.clusters(mlp.NUM_ROWS.value // 5, seed=1),
        batch_size=mlp.BATCH_SIZE.value,
        epochs=mlp.NUM_EPOCHS.value,
        verbose=0,
        callbacks=[
            tfscale.callbacks.BackupAndRestore(backups),
            # Ray ends the process here if the trial is to stop.
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: tune.report(
                    {**logs, "epoch": epoch + 1}
                )
            ),
        ],
    )
    deadline = time.monotonic() + SECONDS_TO_END
    while True:
        try:
            return fit()
        except BlockingIOError:  # Its earlier process has the backups.
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def make_tuner(storage, num_devices, callbacks=None):
    """The search: a new one, or what a killed driver left of it.

    Args:
        storage: Folder of results and backups.
        num_devices: Devices of a trial.
        callbacks: List of `ray.tune.Callback` for a new search.

    Returns:
        A `ray.tune.Tuner`.
    """
    from ray import tune

    trainable = tune.with_resources(
        functools.partial(
            train,
            flag_lines=flags.FLAGS.flags_into_string().splitlines(),
            storage=os.path.join(storage, "backups"),
        ),
        {"CPU": 1, "GPU": num_devices}
        if USE_GPUS.value
        else {"CPU": num_devices},
    )
    results = os.path.join(storage, NAME.value)
    if tune.Tuner.can_restore(results):
        return tune.Tuner.restore(
            results, trainable, resume_unfinished=True, restart_errored=True
        )
    return tune.Tuner(
        trainable,
        param_space={
            "learning_rate": tune.loguniform(1e-4, 1e-1),
            "width": tune.choice([int(width) for width in WIDTHS.value]),
        },
        tune_config=tune.TuneConfig(
            metric="val_loss",
            mode="min",
            num_samples=NUM_TRIALS.value,
            search_alg=tune.search.BasicVariantGenerator(
                max_concurrent=MAX_CONCURRENT.value,
                random_state=mlp.SEED.value,
            ),
            scheduler=tune.schedulers.ASHAScheduler(
                time_attr="epoch",
                max_t=mlp.NUM_EPOCHS.value,
                grace_period=min(MIN_EPOCHS.value, mlp.NUM_EPOCHS.value),
                reduction_factor=2,
            ),
            # TensorFlow keeps a process' devices until it ends.
            reuse_actors=False,
        ),
        run_config=tune.RunConfig(
            name=NAME.value,
            storage_path=storage,
            callbacks=callbacks,
            # A trial that is killed continues at its last epoch.
            failure_config=tune.FailureConfig(max_failures=3),
            verbose=1,
        ),
    )


def main(argv):
    del argv
    try:
        import ray
        from ray import tune  # noqa: F401
    except ImportError as error:
        raise app.UsageError(
            "This example needs Ray Tune. Install it with "
            '`pip install -e ".[ray]"`.'
        ) from error
    ray.init(address=ADDRESS.value, log_to_driver=False)
    devices = (
        mlp.NUM_REPLICAS.value * mlp.NUM_STAGES.value * mlp.MODEL_PARALLEL.value
    )
    kind = "GPU" if USE_GPUS.value else "CPU"
    largest = max(node["Resources"].get(kind, 0) for node in ray.nodes())
    if devices > largest:
        raise app.UsageError(
            f"A trial's devices are of one machine. Received: "
            f"--num_replicas x --num_stages x --model_parallel = {devices}, "
            f"where the largest machine has {largest:.0f} {kind}s."
        )
    results = make_tuner(os.path.abspath(STORAGE.value), devices).fit()
    for result in results:
        metrics = result.metrics or {}
        print(
            json.dumps(
                {
                    **result.config,
                    "epochs": metrics.get("epoch", 0),
                    "val_loss": metrics.get("val_loss"),
                    "error": result.error and type(result.error).__name__,
                }
            )
        )
    if results.num_errors == len(results):
        raise SystemExit("Every trial ended in an error; see above.")
    best = results.get_best_result()
    print(f"Best: {best.config}, val_loss {best.metrics['val_loss']:.4f}")


if __name__ == "__main__":
    app.run(main)
