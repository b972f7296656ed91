"""A batch in microbatches, one after the other, and one update for all."""

__all__ = []
