"""Strategies, their variables, inputs and optimizers."""

from tfscale.distribute.gradient_sums import sum_gradients
from tfscale.distribute.strategy import MeshStrategy

__all__ = ["MeshStrategy", "sum_gradients"]
