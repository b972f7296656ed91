"""Sums and exchanges over devices: as data, predicted, drawn, and executed."""

from tfscale.collectives.execute import execute
from tfscale.collectives.operations import all_gather
from tfscale.collectives.operations import all_reduce
from tfscale.collectives.operations import reduce
from tfscale.collectives.operations import reduce_scatter
from tfscale.collectives.planning.algorithms import direct
from tfscale.collectives.planning.algorithms import hierarchical
from tfscale.collectives.planning.algorithms import parameter_server
from tfscale.collectives.planning.algorithms import two_shot
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
    "hierarchical",
    "parameter_server",
    "reduce",
    "reduce_scatter",
    "save_png",
    "simulate",
    "two_shot",
]
