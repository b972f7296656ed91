"""Strategies, their variables, and what they need of TensorFlow."""

from tfscale.distribute.gradient_sums import sum_gradients
from tfscale.distribute.strategy import MeshStrategy

__all__ = ["MeshStrategy", "sum_gradients"]
