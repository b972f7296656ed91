"""The command `python -m tfscale.plan`; its function is `tfscale.plan`.

tfscale imports this package itself: who imports it first gives its name to
the package, in place of the function.
"""

from tfscale.pipeline.planner.plans import plan as plan

__all__: list[str] = []
