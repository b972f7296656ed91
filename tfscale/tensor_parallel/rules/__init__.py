"""How unmodified Keras layers run on shards of their variables."""

__all__ = []
