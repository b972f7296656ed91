"""Divides the rows of each batch over replicas by their speed.

Of n rows a shard has those from `n * before / all` to `n * (before + speed) /
all`, rounded, where `before` are the speeds of the shards before it. A batch of
a few rows may leave a slow replica none.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.mesh.mesh_config import MeshConfig


def speeds_for(
    dataset: tf.data.Dataset, config: MeshConfig
) -> tuple[float, ...] | None:
    """The speeds of all shards of its batches; None if TensorFlow divides them.

    It divides rows for equal speeds, but not all kinds of tensors. Each worker
    then reads all batches, if it may.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    if config.shard_speeds is not None or all(map(_may_lack_rows, specs)):
        return config.shard_speeds
    if config.workers is None:
        return (1.0,) * config.num_replicas
    if not _reads_all(dataset):
        return None
    return (1.0,) * config.num_replicas * config.workers.count


def _may_lack_rows(spec):
    """Whether TensorFlow gives a replica no rows of a batch as it should."""
    if isinstance(spec, tf.RaggedTensorSpec):
        # No rows have lost their inner dims.
        return spec.shape.rank == spec.ragged_rank + 1
    return not isinstance(spec, tf.SparseTensorSpec)


def divided(
    dataset: tf.data.Dataset, speeds: Sequence[float], shards: range
) -> tf.data.Dataset:
    """Some shards of each batch, one batch for each of them.

    Args:
        dataset: Batches of all replicas, of any number of rows.
        speeds: The speeds of all shards.
        shards: Those of this worker, which reads all batches.
    """
    ends = np.cumsum(speeds)
    ends = np.concatenate([[0.0], ends / ends[-1]])
    is_tuple = type(dataset.element_spec) is tuple

    @tf.autograph.experimental.do_not_convert
    def of_batch(*batch):
        batch = batch if is_tuple else batch[0]
        rows = tf.cast(_num_rows(tf.nest.flatten(batch)[0]), tf.float64)
        bounds = tf.cast(tf.round(rows * ends), tf.int64)

        @tf.autograph.experimental.do_not_convert
        def of_shard(shard):
            begin, end = bounds[shard], bounds[shard + 1]
            return tf.nest.map_structure(
                lambda value: _rows(value, begin, end), batch
            )

        return tf.data.Dataset.range(
            shards.start, shards.stop, shards.step
        ).map(of_shard)

    return dataset.flat_map(of_batch)


def check(dataset: tf.data.Dataset, *, has_workers: bool) -> None:
    """Refuses data whose batches cannot be divided by speed."""
    if has_workers and not _reads_all(dataset):
        raise ValueError(
            "Workers of unequal speed must read the same batches, and each "
            "takes its rows. Received: a dataset with "
            f"auto_shard_policy={_policy(dataset).name}. Use "
            "`AutoShardPolicy.DATA` and the whole data in each worker, or "
            "omit `speeds`."
        )
    for spec in tf.nest.flatten(dataset.element_spec):
        shape = getattr(spec, "shape", tf.TensorShape(None))
        if shape.rank == 0:
            raise ValueError(
                "Data must have rows to be divided by `speeds`. Received: a "
                f"dataset of {dataset.element_spec}. Call `batch` on it."
            )


def _policy(dataset):
    return dataset.options().experimental_distribute.auto_shard_policy


def _reads_all(dataset):
    policies = tf.data.experimental.AutoShardPolicy
    return _policy(dataset) in (policies.AUTO, policies.DATA)


def _num_rows(value: Any) -> tf.Tensor:
    if isinstance(value, tf.SparseTensor):
        return value.dense_shape[0]
    if isinstance(value, tf.RaggedTensor):
        return value.nrows()
    return tf.shape(value, tf.int64)[0]


def _rows(value, begin, end):
    if not isinstance(value, tf.SparseTensor):
        return value[begin:end]
    start = tf.one_hot(0, value.shape.rank, begin, tf.constant(0, tf.int64))
    sizes = tf.concat([[end - begin], value.dense_shape[1:]], 0)
    return tf.sparse.slice(value, start, sizes)
