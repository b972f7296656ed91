"""From a model to functions: its graph, its stages and their phases."""

__all__ = []
