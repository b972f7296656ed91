"""Calls functions on the model ranks of replicas, hidden from users.

Ranks are traced as if they were replicas, a thread for each: all get the inputs
of their replica, and the first one's results are returned.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale._internals import symbols
from tfscale.collectives.reducer import is_per_replica
from tfscale.collectives.reducer import of_first_ranks
from tfscale.mesh.mesh_config import MeshConfig
from tfscale.tensor_parallel.sequence_parallel import sequence_model


class RankCalls:
    """Calls functions on all model ranks.

    Attributes:
        sharded_calls: Calls of the layers so far that have sharded variables.
    """

    def __init__(self, config: MeshConfig):
        self._config = config
        self.sharded_calls: weakref.WeakSet = weakref.WeakSet()
        self._functions: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def run(self, call_ranks: Callable, fn: Callable, args: Any, kwargs: Any):
        """Calls a function; `call_ranks` is that of `MeshExtended`."""
        if not isinstance(fn, tf.types.experimental.PolymorphicFunction):
            return self._run(call_ranks, fn, args, kwargs)
        # One function for all ranks; separate ones could exchange nothing.
        if fn not in self._functions:
            run = functools.partial(self._run, call_ranks, fn.python_function)
            self._functions[fn] = tf.function(run)
        return self._functions[fn](args, kwargs)

    def _run(self, call_ranks, fn, args, kwargs):
        config = self._config
        devices = config.first_stage_devices
        args, kwargs = tf.nest.map_structure(self._to_ranks, (args, kwargs))
        if config.sequence_parallel:
            sequence_model.prepare_called(
                fn,
                lambda fn: call_ranks(fn, devices, args, kwargs),
                self.sharded_calls,
            )
        results = call_ranks(fn, devices, args, kwargs)
        return tf.nest.map_structure(
            lambda value: of_first_ranks(
                value, len(devices), config.num_model_ranks
            ),
            results,
        )

    def _to_ranks(self, value):
        num_ranks = self._config.num_model_ranks
        if not is_per_replica(value, self._config.num_replicas):
            return value
        return symbols.distribute_utils.regroup(
            tuple(v for v in value.values for _ in range(num_ranks))
        )
