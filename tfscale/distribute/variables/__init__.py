"""Variables of a mesh: mirrored over it, sharded, and made."""

__all__: list[str] = []
