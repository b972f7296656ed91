"""Which variables are sharded on which dim: given by a map, or found."""

__all__: list[str] = []
