"""Sums and exchanges over devices: as data, predicted, drawn, and executed."""

from tfscale.collectives.execute import execute
from tfscale.collectives.operations import all_gather
from tfscale.collectives.operations import all_reduce
from tfscale.collectives.operations import reduce
from tfscale.collectives.operations import reduce_scatter
from tfscale.collectives.planning.algorithms.direct import direct
from tfscale.collectives.planning.algorithms.direct import parameter_server
from tfscale.collectives.planning.algorithms.direct import two_shot
from tfscale.collectives.planning.algorithms.halving_doubling import (
    halving_doubling,
)
from tfscale.collectives.planning.algorithms.hierarchical import hierarchical
from tfscale.collectives.planning.algorithms.ring import ring
from tfscale.collectives.planning.algorithms.tree import tree
from tfscale.collectives.planning.choosing import choose
from tfscale.collectives.planning.collective_plan import CollectivePlan
from tfscale.collectives.planning.costs import Costs
from tfscale.collectives.planning.picture import as_text
from tfscale.collectives.planning.picture import save_png
from tfscale.collectives.planning.send import Send
from tfscale.collectives.planning.simulate import Message
from tfscale.collectives.planning.simulate import Simulation
from tfscale.collectives.planning.simulate import simulate

__all__ = [
    "CollectivePlan",
    "Costs",
    "Message",
    "Send",
    "Simulation",
    "all_gather",
    "all_reduce",
    "as_text",
    "choose",
    "direct",
    "execute",
    "halving_doubling",
    "hierarchical",
    "parameter_server",
    "reduce",
    "reduce_scatter",
    "ring",
    "save_png",
    "simulate",
    "tree",
    "two_shot",
]
