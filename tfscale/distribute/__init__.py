"""Strategies, under the name that TensorFlow has for them."""

from tfscale.mesh.gradient_sums import sum_gradients
from tfscale.mesh.strategy import MeshStrategy

__all__ = ["MeshStrategy", "sum_gradients"]
