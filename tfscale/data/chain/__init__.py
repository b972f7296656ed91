"""The order of records, and the chain of steps that they go through."""

__all__ = []
