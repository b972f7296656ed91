"""ZeRO stage 3: weights sharded over replicas, gathered where they are used."""

__all__ = []
