"""Reads what TensorFlow's profiler has recorded of training steps."""

__all__: list[str] = []
