"""What slows a pipeline down, measured, and mistakes found beforehand."""

__all__ = []
