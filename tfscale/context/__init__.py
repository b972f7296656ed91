"""The context of a thread: the step and the model rank that it runs."""

__all__ = []
