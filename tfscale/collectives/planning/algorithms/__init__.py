"""The algorithms that have a name, a file for each family."""

__all__ = []
