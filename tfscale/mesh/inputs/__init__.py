"""How replicas and workers get their batches."""

__all__: list[str] = []
