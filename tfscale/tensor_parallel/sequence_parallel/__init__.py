"""Activations sharded along the sequence, between the sharded layers."""

__all__ = []
