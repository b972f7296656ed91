"""What a device has of a variable: one object says so, and all ask it."""

__all__ = []
