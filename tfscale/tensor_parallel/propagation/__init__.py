"""Which activations of a traced model can stay sharded over the ranks."""

__all__ = []
