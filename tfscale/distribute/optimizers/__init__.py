"""Optimizers of Keras on a mesh: sums over replicas, sharded slots."""

__all__: list[str] = []
