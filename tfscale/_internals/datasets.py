"""The contents of a dataset of tf.data: inputs, functions and settings."""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tfscale._internals.symbols import DistributedIterator
from tfscale._internals.symbols import DistributedIteratorSpec
from tfscale._internals.symbols import InputWorkers

_NUMBERS = (tf.int64, tf.bool)


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    return dataset._inputs()


def settings_of(dataset: tf.data.Dataset) -> dict[str, Any]:
    """The integers, bools and strings that a dataset was created with."""
    found = {}
    for name, value in vars(dataset).items():
        if isinstance(value, tf.Tensor) and value.shape.rank == 0:
            value = value.numpy().item() if value.dtype in _NUMBERS else None
        if isinstance(value, int | str):
            found[name.removeprefix("_")] = value
    return found


def functions_of(dataset: tf.data.Dataset) -> Iterator[Any]:
    """The nodes of each function of a dataset, and of those that it calls."""
    for function in dataset._functions():
        graph = function.function.graph.as_graph_def()
        yield graph.node
        for each in graph.library.function:
            yield each.node_def


class NoTensor(NamedTuple):
    """None in a batch of replicas, as a structure without tensors.

    TensorFlow's iterators for replicas refuse None: they need a dummy value for
    each replica without a batch. Keras makes an empty `Optional`
    of a None from Python, and None of that where it passes a batch to a step:
    not so in a batch of replicas.
    """


def without_none(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset with `NoTensor` in the place of None."""
    nothing = tf.NoneTensorSpec(), tf.OptionalSpec(None)
    return map_values(
        dataset, lambda value: NoTensor(), lambda spec: spec in nothing
    )


def with_sorted_sparse(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset whose sparse tensors have indices in order.

    Keras passes SciPy's arrays on in any order. Batches of these cannot be
    divided: `SerializeManySparse` refuses them.
    """
    return map_values(
        dataset,
        tf.sparse.reorder,
        lambda spec: isinstance(spec, tf.SparseTensorSpec),
    )


def with_none(structure: Any) -> Any:
    """A structure with None in the place of `NoTensor`."""
    return keras.tree.traverse(
        lambda x: keras.tree.MAP_TO_NONE if isinstance(x, NoTensor) else None,
        structure,
    )


def spec_of_batch(element_spec: Any) -> Any:
    """The spec of a batch as a step of Keras takes it: None is None there."""
    kinds = tf.NoneTensorSpec, tf.OptionalSpec
    return tf.nest.map_structure(
        lambda spec: None if isinstance(spec, kinds) else spec,
        with_none(element_spec),
    )


def map_values(
    dataset: tf.data.Dataset,
    function: Callable[[Any], Any],
    is_mapped: Callable[[tf.TypeSpec], bool] = lambda spec: True,
) -> tf.data.Dataset:
    """Maps tensors of an element, and composite tensors, by their specs."""
    structure = dataset.element_spec
    are_mapped = [is_mapped(spec) for spec in tf.nest.flatten(structure)]

    def of_element(*element):
        values = [
            function(value) if mapped else value
            for value, mapped in zip(tf.nest.flatten(element), are_mapped)
        ]
        return tf.nest.pack_sequence_as(structure, values)

    return dataset.map(of_element) if any(are_mapped) else dataset


class SharedIterator(DistributedIterator):
    """One iterator, from which replicas read batches in turn.

    TensorFlow uses an ordinary iterator of tf.data for a worker with one
    device. So each replica is a worker here, and all share the iterator.
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
        spec = super()._type_spec
        spec.__class__ = _SharedIteratorSpec
        return spec


class _SharedIteratorSpec(DistributedIteratorSpec):
    """A spec that passes the iterator to a function once.

    As several arguments TensorFlow would read them in any order.
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
