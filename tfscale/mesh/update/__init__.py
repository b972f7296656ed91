"""Updates on a mesh: of shards, clipped by norms of the whole."""

__all__: list[str] = []
