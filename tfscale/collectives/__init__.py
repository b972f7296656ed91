"""Sums and exchanges of tensors over devices."""

from tfscale.collectives.operations import all_gather
from tfscale.collectives.operations import all_reduce
from tfscale.collectives.operations import reduce_scatter

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]
