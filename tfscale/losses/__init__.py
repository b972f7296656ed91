"""Keras losses of predictions that are divided over the model axis."""

from tfscale.losses.vocab_parallel_sparse_categorical_crossentropy import (
    VocabParallelSparseCategoricalCrossentropy,
)

__all__ = ["VocabParallelSparseCategoricalCrossentropy"]
