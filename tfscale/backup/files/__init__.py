"""Backups as files: written, verified, read, removed.

A store is a subclass of `Storage`, listed in `storage_of` (storage.py).
"""

__all__: list[str] = []
