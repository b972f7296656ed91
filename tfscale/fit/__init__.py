"""The `fit` that runs: what is known of it, and followed."""

__all__: list[str] = []
