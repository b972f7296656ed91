"""Compares training under a strategy with one device: numbers and times."""

__all__: list[str] = []
