"""Which mesh to train on, and why: plans, ranked.

In `tfscale` the name `plan` is the function; the others are imported from here.
"""

from tfscale.plan.device import DEVICES
from tfscale.plan.device import Device
from tfscale.plan.plans import Plan
from tfscale.plan.plans import Plans
from tfscale.plan.plans import plan

__all__ = ["DEVICES", "Device", "Plan", "Plans", "plan"]
