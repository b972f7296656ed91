"""The state of a run: what it is, how it is written, and how it is read."""

__all__ = []
