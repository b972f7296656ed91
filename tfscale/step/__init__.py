"""A training step: parts of a batch that count as the whole."""

__all__ = []
