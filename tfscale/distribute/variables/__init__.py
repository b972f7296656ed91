"""Variables of a mesh: how they are created, mirrored and sharded."""

__all__: list[str] = []
