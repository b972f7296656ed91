"""Pipeline parallelism: schedules, their planning and their execution."""

from tfscale.pipeline.model import PipelineModel
from tfscale.pipeline.planning.action import Action
from tfscale.pipeline.planning.named_schedules import get_schedule
from tfscale.pipeline.planning.named_schedules import gpipe
from tfscale.pipeline.planning.named_schedules import one_f_one_b
from tfscale.pipeline.planning.schedule import Schedule
from tfscale.pipeline.planning.simulate import simulate
from tfscale.pipeline.planning.timeline import as_chrome_trace
from tfscale.pipeline.planning.timeline import as_text
from tfscale.pipeline.planning.timeline import save_png

__all__ = [
    "Action",
    "PipelineModel",
    "Schedule",
    "as_chrome_trace",
    "as_text",
    "get_schedule",
    "gpipe",
    "one_f_one_b",
    "save_png",
    "simulate",
]
