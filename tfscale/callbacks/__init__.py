"""Keras callbacks."""

from tfscale.callbacks.backup_and_restore import BackupAndRestore
from tfscale.callbacks.elastic_workers import ElasticWorkers
from tfscale.callbacks.gradient_accumulation import GradientAccumulation
from tfscale.callbacks.gradient_noise_scale import GradientNoiseScale
from tfscale.callbacks.layer_freezing import LayerFreezing
from tfscale.callbacks.profile import Profile
from tfscale.callbacks.throughput import Throughput

__all__ = [
    "BackupAndRestore",
    "ElasticWorkers",
    "GradientAccumulation",
    "GradientNoiseScale",
    "LayerFreezing",
    "Profile",
    "Throughput",
]
