"""Variables of a mesh: their components, shards and parts."""

__all__ = []
