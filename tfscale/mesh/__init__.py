"""The mesh: its devices, the strategy, and what replicas exchange."""

__all__: list[str] = []
