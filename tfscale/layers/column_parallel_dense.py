"""A dense layer that computes a shard of its outputs on each model rank."""

from typing import Any
from typing import ClassVar

import keras

from tfscale.layers import ranks_in_scope
from tfscale.tensor_parallel.elementwise import acts_on_elements


@keras.saving.register_keras_serializable(package="tfscale")
class ColumnParallelDense(keras.layers.Dense):
    """A `keras.layers.Dense` whose outputs are sharded over the model ranks.

    With T model ranks, `kernel` of shape `(input_dim, units)` and `bias` are
    sharded along the units: rank r computes units `r * units / T` and on, from
    the whole input. No layout map is needed. Without a strategy or model axis
    it is a plain `Dense`, with the same weights.

    A sharded output needs a `RowParallelDense` after it, with only elementwise
    operations between them (activations, dropout). In a functional or
    sequential model that is checked.

    Source: Shoeybi et al., Megatron-LM (2019), section 3;
    `ColumnParallelLinear` of Megatron-LM.

    Args:
        units: Integer, size of the output in full. The model axis divides it.
        activation: As of `keras.layers.Dense`. Applied to the shard if the
            output stays sharded, and then it has to be elementwise.
        gather_output: Boolean. If false, this rank's shard leaves the layer. If
            true, all ranks get the whole.
        **kwargs: Other arguments of `keras.layers.Dense`.

    Call arguments:
        inputs: Tensor of shape `(batch, ..., input_dim)` of a floating dtype,
            the same on all model ranks.

    Returns:
        Tensor of shape `(batch, ..., units / T)`, or `(batch, ..., units)` if
        gathered, in the compute dtype. Symbolic calls, and all outside of
        replicas, see the whole shape.

    Raises:
        ValueError: If `gather_output` is false and there is an activity
            regularizer, or an activation that needs all units. In `build`, if
            the model axis does not divide `units`. In the first step, if what
            follows cannot use a shard.

    Example: a hidden layer of 8 units, 4 on each rank.

    >>> import keras
    >>> import tfscale
    >>> tfscale.use_virtual_devices(8)
    >>> strategy = tfscale.MeshStrategy(tfscale.device_mesh(model=2))
    >>> with strategy.scope():
    ...     up = tfscale.layers.ColumnParallelDense(8, "relu")
    ...     down = tfscale.layers.RowParallelDense(4)
    ...     model = keras.Sequential([keras.Input((4,)), up, down])
    >>> [shard.shape.as_list() for shard in up.kernel.value.values]
    [[4, 4], [4, 4]]
    """

    model_parallel_dims: ClassVar = {"kernel": 1, "bias": 0}

    def __init__(
        self,
        units: int,
        activation: Any = None,
        *,
        gather_output: bool = False,
        **kwargs: Any,
    ):
        super().__init__(units, activation, **kwargs)
        self.gather_output = gather_output
        if gather_output:
            return
        if self.activity_regularizer is not None:
            raise ValueError(
                "An activity regularizer needs the whole output. Received: "
                f"activity_regularizer={self.activity_regularizer} and "
                f"gather_output=False in {self.name!r}. Set "
                "gather_output=True."
            )
        if not acts_on_elements(self.activation):
            name = getattr(self.activation, "__name__", self.activation)
            raise ValueError(
                "The activation of a sharded output must be elementwise. "
                f"Received: activation={name!r} and gather_output=False in "
                f"{self.name!r}. Set gather_output=True."
            )

    def build(self, input_shape: Any) -> None:
        """Creates the variables, sharded if there are model ranks."""
        with ranks_in_scope.building():
            super().build(input_shape)

    def get_config(self) -> dict[str, Any]:
        """See `keras.layers.Layer.get_config`."""
        return {**super().get_config(), "gather_output": self.gather_output}
