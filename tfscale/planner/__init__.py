"""Which mesh to train on, and why: plans, ranked."""

from tfscale.planner.device import DEVICES
from tfscale.planner.device import Device
from tfscale.planner.plans import Plan
from tfscale.planner.plans import Plans
from tfscale.planner.plans import plan

__all__ = ["DEVICES", "Device", "Plan", "Plans", "plan"]
