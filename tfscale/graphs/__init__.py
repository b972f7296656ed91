"""Graphs of TensorFlow: walks through them, and tables of operations."""

__all__ = []
