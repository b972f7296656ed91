"""Strategies, their variables, and what they need of TensorFlow."""

from tfscale.distribute.strategy import MeshStrategy

__all__ = ["MeshStrategy"]
