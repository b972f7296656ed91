"""Bottlenecks of a pipeline, measured, and mistakes found beforehand."""

__all__ = []
