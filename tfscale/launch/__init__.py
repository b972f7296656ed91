"""Starts the processes of a cluster: `python -m tfscale.launch program.py`."""

__all__ = []
