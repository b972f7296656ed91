"""What a dataset of TensorFlow is made of: of others, and of functions.

The attributes that are read here are in the tables beside, with why.
"""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfscale._internals.symbols import DistributedIterator
from tfscale._internals.symbols import DistributedIteratorSpec
from tfscale._internals.symbols import InputWorkers

_OF_PYTHON = ("EagerPyFunc", "GeneratorDataset", "PyFunc", "PyFuncStateless")
_ASKED = "tfscale_asks_python"


def asked_of_python(
    function: Callable[[], int], dtype: tf.DType = tf.bool
) -> tf.Tensor:
    """A scalar tensor that Python answers, each time; for tf.data.

    It makes no records: see `is_asked`.
    """
    answer = tf.numpy_function(
        lambda: dtype.as_numpy_dtype(function()), [], dtype, name=_ASKED
    )
    answer.set_shape([])
    return answer


def is_asked(node: Any) -> bool:
    """Whether a node is that of `asked_of_python`."""
    return node.name == _ASKED


def variant_of(dataset: tf.data.Dataset) -> tf.Tensor:
    """The tensor that a dataset is."""
    return dataset._variant_tensor


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The datasets that a dataset is made of."""
    return dataset._inputs()


def shuffle_seeds(dataset: tf.data.Dataset) -> list[tuple[int, int]]:
    """The seeds of all that puts the records of a dataset in a random order.

    Of shuffles and random choices between datasets, and of shuffles in
    functions. `(0, 0)` is of one without a seed.
    """
    seeds = []
    if hasattr(dataset, "_seed2"):
        seeds.append((int(dataset._seed), int(dataset._seed2)))
    for nodes in _functions_of(dataset):
        seeds += _seeds_of(nodes)
    for source in dataset._inputs():
        seeds += shuffle_seeds(source)
    return seeds


def batch_sizes(dataset: tf.data.Dataset) -> list[int]:
    """The numbers by which the records of a dataset are put into batches.

    Those of `batch`; and the shapes that functions give to what they reshape,
    by which Keras batches arrays.
    """
    sizes = []
    if hasattr(dataset, "_batch_size"):
        sizes.append(int(dataset._batch_size))
    for nodes in _functions_of(dataset):
        sizes += _shapes_given(nodes)
    for source in dataset._inputs():
        sizes += batch_sizes(source)
    return sizes


def without_order(dataset: tf.data.Dataset) -> str | None:
    """What may give the records of a dataset in another order each time.

    A function of Python that makes them, or a map that takes them as they come;
    None if there is neither. Of other operations it cannot be known.
    """
    if getattr(dataset, "_deterministic", "") == "false":
        return "a map with deterministic=False"
    for function in dataset._functions():
        graph = function.function.graph.as_graph_def()
        if any(node.op == "GeneratorDataset" for node in graph.node):
            return "a generator of Python"
    found = (without_order(source) for source in dataset._inputs())
    return next((each for each in found if each), None)


def calls_python(dataset: tf.data.Dataset) -> bool:
    """Whether functions of Python give a dataset what is in its records."""
    return any(
        node.op in _OF_PYTHON and not is_asked(node)
        for nodes in _functions_of(dataset)
        for node in nodes
    ) or any(map(calls_python, dataset._inputs()))


def _functions_of(dataset: tf.data.Dataset) -> Iterator[Any]:
    """The nodes of each function of a dataset, and of those that it calls."""
    for function in dataset._functions():
        graph = function.function.graph.as_graph_def()
        yield graph.node
        for each in graph.library.function:
            yield each.node_def


def _constants_among(nodes):
    return {
        node.name: node.attr["value"] for node in nodes if node.op == "Const"
    }


def _shapes_given(nodes):
    """The shapes that are known, of reshapes among the nodes of a function."""
    known = _constants_among(nodes)
    for node in nodes:
        if node.op == "Reshape":
            shape = known.get(node.input[1].partition(":")[0])
            if shape is not None:
                yield from tf.make_ndarray(shape.tensor).ravel().tolist()


def _seeds_of(nodes):
    """The seeds of shuffles among the nodes of a function."""
    known = _constants_among(nodes)
    for node in nodes:
        if node.op == "RandomShuffle":
            yield node.attr["seed"].i, node.attr["seed2"].i
        elif node.op.startswith("Shuffle"):
            # Of a dataset: its input, the size of the buffer, two seeds.
            values = [known.get(x.partition(":")[0]) for x in node.input[2:4]]
            if None not in values:
                first, second = (tf.make_ndarray(v.tensor) for v in values)
                yield int(first), int(second)


class SharedIterator(DistributedIterator):
    """One iterator, from which all replicas take batches, one by one.

    TensorFlow knows an ordinary iterator of tf.data for a worker with one
    device. So there is a worker for each replica here, and all have the same.
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
