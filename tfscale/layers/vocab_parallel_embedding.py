"""An embedding whose rows are sharded over the model ranks."""

from typing import Any
from typing import ClassVar

import keras

from tfscale.layers import ranks_in_scope


@keras.saving.register_keras_serializable(package="tfscale")
class VocabParallelEmbedding(keras.layers.ReversibleEmbedding):
    """A `keras.layers.ReversibleEmbedding` sharded along its vocabulary.

    With T model ranks, rank r has rows `r * input_dim / T` and on of the table
    `embeddings` of shape `(input_dim, output_dim)`, looks up the tokens that it
    has rows for, and zeros for all others; the sum over the ranks is the
    embedding. In reverse (`reverse=True`) it makes the logits of these rows'
    tokens, which `tfscale.losses.VocabParallelSparseCategoricalCrossentropy`
    takes as they are; anything else gets all logits. No layout map is needed.
    With no strategy, or no model axis, it is a plain layer with the weights of
    a `keras.layers.Embedding`.

    Source: Shoeybi et al., Megatron-LM (2019), section 3, on input and output
    embedding; `VocabParallelEmbedding` of Megatron-LM.

    Args:
        input_dim: Integer, size of the vocabulary. The model axis divides it;
            if it does not, round the size up: the tokens that are not there
            cost a row each.
        output_dim: Integer, size of an embedding.
        **kwargs: Other arguments of `keras.layers.ReversibleEmbedding`.

    Call arguments:
        inputs: Integer tensor of shape `(batch, ...)` with values from 0 to
            `input_dim - 1`, the same on all model ranks. In reverse, a tensor
            of shape `(batch, ..., output_dim)` of a floating dtype.
        reverse: Boolean.

    Returns:
        Tensor of shape `(batch, ..., output_dim)` in the compute dtype, or in
        reverse logits of shape `(batch, ..., input_dim)`, the same on all
        ranks.

    Raises:
        ValueError: In `build`, if the model axis does not divide `input_dim`.

    Example:

    >>> import tfscale
    >>> tfscale.use_virtual_devices(8)
    >>> strategy = tfscale.MeshStrategy(tfscale.device_mesh(model=4))
    >>> with strategy.scope():
    ...     embedding = tfscale.layers.VocabParallelEmbedding(12, 2)
    ...     embedding.build()
    >>> [shard.shape.as_list() for shard in embedding.embeddings.value.values]
    [[3, 2], [3, 2], [3, 2], [3, 2]]
    """

    model_parallel_dims: ClassVar = {"embeddings": 0, "reverse_embeddings": 1}

    def build(self, input_shape: Any = None) -> None:
        """Creates the table, sharded if there are model ranks."""
        with ranks_in_scope.building():
            super().build(input_shape)
