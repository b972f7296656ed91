"""Sums and exchanges over devices: as data, predicted, drawn, and executed."""

from tfscale.collectives.operations import all_gather
from tfscale.collectives.operations import all_reduce
from tfscale.collectives.operations import reduce_scatter
from tfscale.collectives.planning.algorithms import direct
from tfscale.collectives.planning.algorithms import hierarchical
from tfscale.collectives.planning.algorithms import two_shot
from tfscale.collectives.planning.choosing import choose
from tfscale.collectives.planning.collective_plan import CollectivePlan
from tfscale.collectives.planning.costs import Costs
from tfscale.collectives.planning.picture import as_text
from tfscale.collectives.planning.simulate import simulate

__all__ = [
    "CollectivePlan",
    "Costs",
    "all_gather",
    "all_reduce",
    "as_text",
    "choose",
    "direct",
    "hierarchical",
    "reduce_scatter",
    "simulate",
    "two_shot",
]
