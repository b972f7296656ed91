"""Where records come from: arrays, files, datasets."""

__all__ = []
