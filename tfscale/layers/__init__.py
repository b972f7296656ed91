"""Keras layers that shard their own variables, over ranks or servers."""

from tfscale.layers.column_parallel_dense import ColumnParallelDense
from tfscale.layers.parallel_multi_head_attention import (
    ParallelMultiHeadAttention,
)
from tfscale.layers.row_parallel_dense import RowParallelDense
from tfscale.layers.sharded_embedding import ShardedEmbedding
from tfscale.layers.vocab_parallel_embedding import VocabParallelEmbedding

__all__ = [
    "ColumnParallelDense",
    "ParallelMultiHeadAttention",
    "RowParallelDense",
    "ShardedEmbedding",
    "VocabParallelEmbedding",
]
