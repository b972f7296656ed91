"""The `fit` that runs: its epochs and callbacks."""

__all__: list[str] = []
