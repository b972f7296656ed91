"""Multi-head attention whose heads are sharded over the model ranks."""

from typing import Any
from typing import ClassVar

import keras

from tfscale.layers import ranks_in_scope


@keras.saving.register_keras_serializable(package="tfscale")
class ParallelMultiHeadAttention(keras.layers.MultiHeadAttention):
    """A `keras.layers.MultiHeadAttention` with heads on all model ranks.

    With T model ranks, each rank has the projections of `num_heads / T` heads
    (column-parallel), computes their attention by itself, and a term of the
    output (row-parallel), which is added up over the ranks. No layout map is
    needed. With no strategy, or no model axis, it is the plain layer, and its
    weights are those of one.

    Source: Shoeybi et al., Megatron-LM (2019), section 3, figure 3b;
    `ParallelAttention` of Megatron-LM.

    Args:
        num_heads: Integer, number of heads in full. The model axis divides it.
        key_dim: Integer, size of each head of queries and keys.
        **kwargs: Other arguments of `keras.layers.MultiHeadAttention`.

    Call arguments:
        As of `keras.layers.MultiHeadAttention`; inputs and masks are whole, the
        same on all model ranks.

    Returns:
        As of `keras.layers.MultiHeadAttention`: the output, of shape
        `(batch, positions, output_dim)` in the compute dtype, and if asked for
        the scores of all heads. Whole, the same on all ranks.

    Raises:
        ValueError: In `build`, if the model axis does not divide `num_heads`.

    Example: two heads, one on each rank.

    >>> import tfscale
    >>> tfscale.use_virtual_devices(8)
    >>> strategy = tfscale.MeshStrategy(tfscale.device_mesh(model=2))
    >>> with strategy.scope():
    ...     layer = tfscale.layers.ParallelMultiHeadAttention(2, key_dim=3)
    ...     layer.build((None, 5, 6), (None, 5, 6))
    >>> kernel = layer.query_dense.kernel
    >>> kernel.shape
    TensorShape([6, 2, 3])
    >>> [shard.shape.as_list() for shard in kernel.value.values]
    [[6, 1, 3], [6, 1, 3]]
    """

    model_parallel_dims: ClassVar = {
        "query/kernel": 1,
        "query/bias": 0,
        "key/kernel": 1,
        "key/bias": 0,
        "value/kernel": 1,
        "value/bias": 0,
        "gate/kernel": 1,
        "gate/bias": 0,
        "attention_output/kernel": 0,
    }

    def build(
        self, query_shape: Any, value_shape: Any, key_shape: Any = None
    ) -> None:
        """Creates the variables, sharded by heads if there are model ranks."""
        with ranks_in_scope.building():
            super().build(query_shape, value_shape, key_shape)
