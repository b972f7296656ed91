"""How a step visits its batch: whole, or in a loop of microbatches."""

__all__ = []
