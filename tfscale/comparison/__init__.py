"""Compares a training on one device with the same under a strategy."""

__all__: list[str] = []
