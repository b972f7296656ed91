"""Keras losses of predictions that are sharded over the model axis."""

from tfscale.losses.vocab_parallel_sparse_categorical_crossentropy import (
    VocabParallelSparseCategoricalCrossentropy,
)

__all__ = ["VocabParallelSparseCategoricalCrossentropy"]
