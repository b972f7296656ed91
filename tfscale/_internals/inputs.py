"""A distributed iterator from which all replicas take batches, one by one.

TensorFlow knows an ordinary iterator of tf.data for a worker with one device.
So there is a worker for each replica here, and all have the same iterator.
"""

import tensorflow as tf

from tfscale._internals.symbols import DistributedIterator
from tfscale._internals.symbols import DistributedIteratorSpec
from tfscale._internals.symbols import InputWorkers


class SharedIterator(DistributedIterator):
    """Takes over what TensorFlow's iterator holds.

    Args:
        iterator: A `tf.distribute.DistributedIterator`.
        is_ordinary: Whether it was made with `ORDINARY_ITERATOR`.
    """

    def __init__(self, iterator, is_ordinary):
        vars(self).update(vars(iterator))
        if is_ordinary:
            (host,) = self._input_workers.worker_devices
            devices = self._input_workers.compute_devices_for_worker(0)
            self._input_workers = InputWorkers([(host, (d,)) for d in devices])
            self._iterators = self._iterators * len(devices)

    @property
    def _type_spec(self):
        return _SharedIteratorSpec(
            self._input_workers,
            self._element_spec,
            self._strategy,
            self._options,
            self._cardinality,
            self._enable_get_next_as_optional,
        )


class _SharedIteratorSpec(DistributedIteratorSpec):
    """A function is handed the iterator once.

    As several arguments it would be several iterators to TensorFlow, which
    are read in any order.
    """

    @property
    def value_type(self):
        return SharedIterator

    @property
    def _component_specs(self):
        return super()._component_specs[:1]

    def _to_components(self, value):
        return super()._to_components(value)[:1]

    def _from_components(self, components):
        count = len(super()._component_specs)
        iterator = super()._from_components(list(components) * count)
        return SharedIterator(iterator, is_ordinary=False)


ORDINARY_ITERATOR = tf.distribute.InputOptions(
    experimental_fetch_to_device=False,
    experimental_replication_mode=(
        tf.distribute.InputReplicationMode.PER_REPLICA
    ),
)
