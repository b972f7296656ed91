"""Models on a mesh: wrapped, built by parts, saved and loaded."""

__all__: list[str] = []
