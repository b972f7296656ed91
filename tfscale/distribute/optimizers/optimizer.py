"""Which class an optimizer has on a mesh, made in the scope of a strategy."""

import keras

from tfscale import in_place
from tfscale.distribute.optimizers.mesh_optimizer import MeshOptimizer
from tfscale.distribute.optimizers.mesh_optimizer import set_extended
from tfscale.distribute.optimizers.sharded_optimizer import ShardedLARS
from tfscale.distribute.optimizers.sharded_optimizer import (
    ShardedLossScaleOptimizer,
)
from tfscale.distribute.optimizers.sharded_optimizer import ShardedOptimizer
from tfscale.optimizers.lars import LARS


def adapt_optimizer(optimizer: keras.Optimizer, extended) -> None:
    """Has an optimizer work on a mesh; its configuration stays the same.

    Args:
        optimizer: The Keras optimizer.
        extended: The `MeshExtended` that its variables belong to.
    """
    set_extended(optimizer, extended)
    if (
        extended.num_model_ranks == 1
        and not extended.optimizer_states.are_sharded
    ):
        in_place.put(optimizer, MeshOptimizer)
    elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        in_place.put(optimizer, ShardedLossScaleOptimizer)
    elif isinstance(optimizer, LARS):
        in_place.put(optimizer, ShardedLARS)
    else:
        in_place.put(optimizer, ShardedOptimizer)
