"""Accumulation: a batch in a loop of microbatches, with one update."""

__all__: list[str] = []
