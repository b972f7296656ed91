"""Where records come from: arrays, files, datasets.

A kind of data has a module with a builder, listed in data/__init__.py.
"""

__all__ = []
