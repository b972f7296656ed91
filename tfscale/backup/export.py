"""A backup as a file of Keras."""

import keras

from tfscale.backup.files.folder import BackupFolder
from tfscale.backup.state.variables import restore
from tfscale.backup.state.variables import variables_of
from tfscale.mesh.models.wrapped_model import WrappedModel


def export_backup(
    backup_dir: str, filepath: str, model: keras.Model | None = None
) -> keras.Model:
    """Writes the model of the newest backup to a file of Keras.

    It runs on one device, also beside a run, whose backups it does not change.

    Args:
        backup_dir: Folder of `tfscale.callbacks.BackupAndRestore`.
        filepath: Ends in `.keras`, or in `.weights.h5` for weights alone.
        model: A built model for the weights, if that of the run has no
            configuration: a subclass without `get_config`. By default it is
            created from the backup.

    Returns:
        The model.

    Raises:
        FileNotFoundError: If there is no backup.
        ValueError: If the file has another ending, the model has no
            configuration, or `model` is another one.

    Example:

    >>> import tempfile
    >>> import numpy as np
    >>> from tfscale.callbacks import BackupAndRestore
    >>> folder = tempfile.mkdtemp()
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("adam", "mse")
    >>> backup = BackupAndRestore(folder, save_freq=1, delete_checkpoint=False)
    >>> history = model.fit(
    ...     np.ones((64, 2)), np.ones((64, 1)), verbose=0, callbacks=[backup]
    ... )
    >>> exported = export_backup(folder, folder + "/model.keras")
    >>> exported.count_params()
    3
    """
    if not filepath.endswith((".keras", ".weights.h5")):
        raise ValueError(
            "`filepath` must end in '.keras' or '.weights.h5'. "
            f"Received: filepath={filepath!r}."
        )
    backup = BackupFolder(backup_dir, keep=1, fit=None).newest(
        leave_damaged=True
    )
    if backup is None:
        raise FileNotFoundError(
            "`backup_dir` must contain a backup. Received: "
            f"backup_dir={backup_dir!r}, which contains none."
        )
    if model is None:
        config = backup.state["model"]
        if config is None:
            raise ValueError(
                "A model without a configuration cannot be created from its "
                "backup. Received: model=None. Pass the built model, or give "
                "its class `get_config` and register it."
            )
        model = keras.models.model_from_json(config)
    entries = [e for e in variables_of(model) if e.key.startswith("model/")]
    for entry in entries:
        found = backup.tensors.get(entry.key)
        shape = list(entry.variable.shape)
        if found is None or found["shape"] != shape:
            raise ValueError(
                "`model` must be the model of the run. Received: a model in "
                f"which {entry.name!r} has shape {shape}; in the backup it has "
                f"{found and found['shape']}."
            )
    restore(entries, backup)
    if filepath.endswith(".keras"):
        model.save(filepath)
    else:
        model.save_weights(filepath)
    return model


def config_of(model: keras.Model) -> str | None:
    """The JSON of the configuration of a model; None if it has none."""
    # A pipeline, which wraps a model, is saved as that one.
    if isinstance(model, WrappedModel):
        model = model.model
    try:
        return model.to_json()
    except (NotImplementedError, TypeError, ValueError):
        return None
