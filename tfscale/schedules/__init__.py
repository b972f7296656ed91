"""Schedules of pipelines, simulated and drawn: integers only.

A schedule is a function, listed in `SCHEDULES` (named_schedules.py).
"""

from tfscale.schedules.action import Action
from tfscale.schedules.named_schedules import get_schedule
from tfscale.schedules.named_schedules import gpipe
from tfscale.schedules.named_schedules import one_f_one_b
from tfscale.schedules.schedule import Schedule
from tfscale.schedules.simulate import simulate
from tfscale.schedules.timeline import as_chrome_trace
from tfscale.schedules.timeline import as_text
from tfscale.schedules.timeline import save_png

__all__ = [
    "Action",
    "Schedule",
    "as_chrome_trace",
    "as_text",
    "get_schedule",
    "gpipe",
    "one_f_one_b",
    "save_png",
    "simulate",
]
