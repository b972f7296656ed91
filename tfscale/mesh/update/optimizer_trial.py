"""Tries whether an optimizer updates each element of a variable by itself.

A custom optimizer may use a whole variable: its norm, say, or the norm of all
gradients, in an `apply` that clips. On shards it would compute something else.
So it updates small variables, whole ones and then the first halves of those
that are sharded, and both halves have to be equal.
"""

import itertools
from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf

from tfscale.graphs.noting_scope import outside_scopes
from tfscale.variables.sharding import Sharding

# Small enough that nothing is clipped, and so large that everything is.
_MAGNITUDES = (1e-2, 1.0, 1e2)
_SIZE, _SHARDED_SIZE = 5, 6


def is_elementwise(
    optimizer: keras.Optimizer, shardings: Iterable[Sharding]
) -> bool:
    """Whether an optimizer updates shards as it updates whole variables.

    A copy, made by `get_config`, is tried on the CPU, by a thread that is in no
    strategy and no graph, without Keras' own clipping. Raises what it raises.
    """
    cases = {(len(s.shape), s.model_dim, s.data_dim) for s in shardings}
    shapes, shards = [], []
    for rank, *dims in sorted(cases, key=repr):
        are_sharded = [dim in dims for dim in range(rank)]
        shapes.append([_SHARDED_SIZE if x else _SIZE for x in are_sharded])
        half = slice(_SHARDED_SIZE // 2)
        shards.append(tuple(half if x else slice(None) for x in are_sharded))
    random = np.random.default_rng(0)
    values, *gradients = [
        [magnitude * random.normal(size=shape) for shape in shapes]
        for magnitude in (1.0, *_MAGNITUDES)
    ]

    def take(arrays):
        return [array[shard] for array, shard in zip(arrays, shards)]

    def updated():
        whole = _updates(optimizer, values, gradients)
        of_shard = _updates(optimizer, take(values), map(take, gradients))
        return list(map(take, whole)), of_shard

    expected, found = outside_scopes(updated)
    before = take(values)
    for old, new, new_shard in zip(
        itertools.chain(before, *expected),
        itertools.chain(*expected),
        itertools.chain(*found),
    ):
        step = np.abs(new - old).max(initial=0.0)
        error = np.abs(new - new_shard).max(initial=0.0)
        # Rounding errors scale with values, real differences with steps.
        if error > 1e-3 * step + 1e-5 * np.abs(new).max(initial=0.0):
            return False
    return True


def _updates(optimizer, values, gradients):
    config = optimizer.get_config()
    for name in ("clipnorm", "global_clipnorm", "clipvalue"):
        config.pop(name, None)
    if "learning_rate" in config:
        # A schedule may begin with zero.
        config["learning_rate"] = 0.1
    found = []
    with tf.device("CPU:0"):
        copy = optimizer.__class__.from_config(config)
        variables = [keras.Variable(v, dtype="float32") for v in values]
        for step in gradients:
            tensors = [tf.constant(g, tf.float32) for g in step]
            copy.apply_gradients(zip(tensors, variables))
            found.append([v.numpy() for v in variables])
    return found
