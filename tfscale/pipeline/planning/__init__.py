"""Planning of pipelines with integers only: schedules, simulation, balance.

A schedule is a function, listed in `SCHEDULES` (named_schedules.py).
"""

__all__ = []
