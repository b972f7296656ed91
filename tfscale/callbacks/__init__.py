"""Keras callbacks."""

from tfscale.callbacks.backup_and_restore import BackupAndRestore
from tfscale.callbacks.input_wait import InputWait

__all__ = ["BackupAndRestore", "InputWait"]
