"""The sharding of a variable over devices, as one object."""

__all__ = []
