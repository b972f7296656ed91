"""The algorithms that have a name: a function of the sizes for each.

With n devices, a tensor of S bytes, a latency a and a bandwidth B, an
all-reduce takes (where each device sends and gets S bytes in S / B, and
latencies of several sends overlap)

    direct               a              + (n - 1) S / B
    parameter_server     2 a            + 2 (n - 1) S / B
    two_shot             2 a            + 2 (n - 1) / n S / B
    ring                 2 (n - 1) a    + 2 (n - 1) / n S / B
    tree                 2 log2(n) a    + 2 log2(n) S / B
    halving_doubling     2 log2(n) a    + 2 (n - 1) / n S / B

the last two for powers of two. No algorithm sends less than 2 (n - 1) / n S
from each device, or needs fewer than log2(n) rounds of one partner each.

Sources: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for
clusters of workstations (2009), for the ring; Thakur, Rabenseifner and Gropp,
Optimization of collective communication operations in MPICH (2005), for the
tree and halving and doubling; Li et al., Scaling distributed machine learning
with the parameter server (2014).
"""

from tfscale.collectives.planning.algorithms.direct import direct
from tfscale.collectives.planning.algorithms.direct import parameter_server
from tfscale.collectives.planning.algorithms.direct import two_shot
from tfscale.collectives.planning.algorithms.halving_doubling import (
    halving_doubling,
)
from tfscale.collectives.planning.algorithms.ring import ring
from tfscale.collectives.planning.algorithms.tree import tree

ALGORITHMS = {
    "direct": direct,
    "two_shot": two_shot,
    "parameter_server": parameter_server,
    "ring": ring,
    "tree": tree,
    "halving_doubling": halving_doubling,
}

# Those of them whose only operation is all-reduce.
ALL_REDUCE_ONLY = ("two_shot", "parameter_server")
