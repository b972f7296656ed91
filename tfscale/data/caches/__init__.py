"""Parsed records that are kept, in memory or on disk."""

__all__ = []
