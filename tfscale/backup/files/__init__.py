"""Backups as files: written, vouched for, read, removed."""

__all__: list[str] = []
