"""One ordinary iterator of tf.data, from which replicas take batches in turn.

    dataset ─► batches of replicas ─► read ahead ─► iterator ─┬─► replica 0
                                                              ├─► replica 1
                                                              └─► ...

TensorFlow's iterator for several devices has one more for each of them, and in
it a `GeneratorDataset`, which makes glibc map memory anew for all of more than
128 KiB, for as long as the process lives (`ApplyPython311MemoryPatch`,
TensorFlow 2.21). That costs what works on microbatches and shards a tenth of
its time. CPUs have nothing of it: their batches are where they are used.

TensorFlow knows an ordinary iterator for a worker with one device. So here is a
worker for each replica, all of which have the same iterator.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfscale import _internals
from tfscale import in_place


def ordinary_iterator() -> tf.distribute.InputOptions:
    """Options with which a distributed dataset makes such iterators."""
    return tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=(
            tf.distribute.InputReplicationMode.PER_REPLICA
        ),
    )


def taken_in_turn(distributed: Any) -> Any:
    """A distributed dataset from whose iterators all replicas take batches.

    Args:
        distributed: One with the options of `ordinary_iterator`, for replicas
            of this process. Of a single one nothing changes.
    """
    in_place.put(distributed, _TakenInTurn)
    return distributed


# No `in_place.Mixin`, see placed_inputs.py.
class _TakenInTurn(Iterable):
    def __iter__(self):
        iterator = super().__iter__()
        in_place.put(iterator, _InTurn)
        iterator.give_to_all_replicas()
        return iterator


class _InTurn(Iterator):
    def give_to_all_replicas(self):
        (host,) = self._input_workers.worker_devices
        devices = self._input_workers.compute_devices_for_worker(0)
        self._input_workers = _internals.InputWorkers(
            [(host, (device,)) for device in devices]
        )
        self._iterators = self._iterators * len(devices)

    @property
    def _type_spec(self):
        spec = super()._type_spec
        in_place.put(spec, _InTurnSpec)
        return spec


class _InTurnSpec:
    """A function is handed the iterator once.

    As several arguments it would be several iterators to TensorFlow, which
    are read in any order.
    """

    @property
    def _component_specs(self):
        return super()._component_specs[:1]

    def _to_components(self, value):
        return super()._to_components(value)[:1]

    def _from_components(self, components):
        count = len(super()._component_specs)
        iterator = super()._from_components(list(components) * count)
        in_place.put(iterator, _InTurn)
        return iterator
