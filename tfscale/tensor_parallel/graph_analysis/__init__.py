"""Which activations of a traced model can stay divided over the ranks."""

__all__ = []
