"""Optimizers and learning rates for large batches."""

from tfscale.optimizers.lars import LARS
from tfscale.optimizers.scaled_learning_rate import ScaledLearningRate

__all__ = ["LARS", "ScaledLearningRate"]
