"""A dense layer that takes a shard of its inputs on each model rank."""

from typing import Any
from typing import ClassVar

import keras

from tfscale.layers import ranks_in_scope


@keras.saving.register_keras_serializable(package="tfscale")
class RowParallelDense(keras.layers.Dense):
    """A `keras.layers.Dense` whose inputs are sharded over the model ranks.

    With T model ranks, `kernel` of shape `(input_dim, units)` is sharded along
    its rows: from its shard of the input, each rank computes a term of the
    output, and the terms are summed over the ranks. The bias, which is whole on
    all ranks, and the activation come after that. No layout map is needed.
    Without a strategy or model axis it is a plain `Dense`, with the same
    weights.

    Source: Shoeybi et al., Megatron-LM (2019), section 3; `RowParallelLinear`
    of Megatron-LM.

    Args:
        units: Integer, size of the output.
        activation: As of `keras.layers.Dense`; any.
        input_is_parallel: Boolean. If true, the input is this rank's shard, as
            `ColumnParallelDense` leaves it. If false, it is whole, and sharded
            here.
        **kwargs: Other arguments of `keras.layers.Dense`.

    Call arguments:
        inputs: Tensor of shape `(batch, ..., input_dim / T)` of a floating
            dtype, or `(batch, ..., input_dim)` if `input_is_parallel` is false.
            Symbolic calls, and all outside of replicas, take the whole shape.

    Returns:
        Tensor of shape `(batch, ..., units)` in the compute dtype, the same on
        all model ranks.

    Raises:
        ValueError: In `build`, if the model axis does not divide the size of
            the input. In the first step, if the input is whole and
            `input_is_parallel` is true.

    Example: as a plain layer, with no strategy.

    >>> import numpy as np
    >>> import tfscale
    >>> layer = tfscale.layers.RowParallelDense(2, use_bias=False)
    >>> layer(np.zeros((3, 4), "float32")).shape
    TensorShape([3, 2])

    After a layer that leaves its output whole:

    >>> import keras
    >>> tfscale.use_virtual_devices(8)
    >>> strategy = tfscale.MeshStrategy(tfscale.device_mesh(model=2))
    >>> with strategy.scope():
    ...     head = tfscale.layers.RowParallelDense(1, input_is_parallel=False)
    ...     model = keras.Sequential(
    ...         [keras.Input((4,)), keras.layers.LayerNormalization(), head]
    ...     )
    >>> [shard.shape.as_list() for shard in head.kernel.value.values]
    [[2, 1], [2, 1]]
    """

    model_parallel_dims: ClassVar = {"kernel": 0}

    def __init__(
        self,
        units: int,
        activation: Any = None,
        *,
        input_is_parallel: bool = True,
        **kwargs: Any,
    ):
        super().__init__(units, activation, **kwargs)
        self.input_is_parallel = input_is_parallel

    def build(self, input_shape: Any) -> None:
        """Creates the variables, the kernel sharded over the ranks."""
        with ranks_in_scope.building():
            super().build(input_shape)
        if ranks_in_scope.num_ranks() > 1 and self.input_is_parallel:
            # It would say no to a part of the input.
            self.input_spec = keras.layers.InputSpec(min_ndim=2)

    def get_config(self) -> dict[str, Any]:
        """See `keras.layers.Layer.get_config`."""
        return {
            **super().get_config(),
            "input_is_parallel": self.input_is_parallel,
        }
