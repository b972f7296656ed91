"""Plans of `tfscale.plan`, and the devices that it knows."""

from tfscale.pipeline.planner.device import DEVICES
from tfscale.pipeline.planner.device import Device
from tfscale.pipeline.planner.plans import Plan
from tfscale.pipeline.planner.plans import Plans

__all__ = ["DEVICES", "Device", "Plan", "Plans"]
