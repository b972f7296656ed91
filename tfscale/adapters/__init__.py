"""Subclasses that replace classes of Keras objects: one file per class."""

__all__: list[str] = []
