"""Maps of the package's own functions, which start at once.

tf.data readies a function anew for each iterator. It does so for several
devices: the graph is placed, optimized by Grappler and partitioned, at 3 ms and
0.4 ms an operation. A function that is marked for one device runs as it is
written, and is ready in a tenth of that.

What is written here in few operations, and runs once a batch or a window, gains
by it. What a user has written runs once a record and may gain from Grappler:
`Dataset.map` is for that. Nor is what is written here rewritten by AutoGraph,
which takes longer than all the rest of making a pipeline.
"""

import tensorflow as tf

from tfscale import _internals

_ONE_DEVICE = {"experimental_ints_on_device": True}


class _Transformed(tf.data.Dataset):
    """A dataset with a function that is marked for one device."""

    def __init__(self, dataset, function, kind, make, name=None, state=()):
        self._dataset = dataset
        self._name = name  # where tf.data looks for it
        taken = dataset.element_spec
        self._function = _internals.StructuredFunctionWrapper(
            tf.autograph.experimental.do_not_convert(function),
            kind,
            input_structure=(state, taken) if state else taken,
            defun_kwargs=dict(_ONE_DEVICE),
        )
        spec = self._function.output_structure
        if state:
            spec = spec[1]
        if isinstance(spec, tf.data.DatasetSpec):
            spec = spec.element_spec
        self._spec = spec
        super().__init__(
            make(
                input_dataset=tf.data.experimental.to_variant(dataset),
                other_arguments=self._function.function.captured_inputs,
                f=self._function.function,
                **self._common_args,
            )
        )

    def _inputs(self):
        return [self._dataset]

    def _functions(self):
        return [self._function]

    @property
    def element_spec(self):
        """Structure of `tf.TensorSpec`: what the function returns."""
        return self._spec


def map_on_host(dataset, function, *, num_parallel_calls=None, name=None):
    """`dataset.map(function)`.

    Args:
        dataset: `tf.data.Dataset`.
        function: Function of an element.
        num_parallel_calls: As of `Dataset.map`.
        name: String, of the transformation.

    Returns:
        `tf.data.Dataset`.
    """

    def make(**common):
        if num_parallel_calls is None:
            return tf.raw_ops.MapDataset(preserve_cardinality=True, **common)
        return tf.raw_ops.ParallelMapDatasetV2(
            num_parallel_calls=tf.constant(num_parallel_calls, tf.int64),
            preserve_cardinality=True,
            **common,
        )

    return _Transformed(dataset, function, "Dataset.map()", make, name)


def scan_on_host(dataset, state, specs, function):
    """`dataset.scan(state, function)`.

    Args:
        dataset: `tf.data.Dataset`.
        state: List of tensors.
        specs: Tuple of `tf.TensorSpec`, of every state.
        function: Function of a tuple, the state, and an element that returns
            the next state and an element.

    Returns:
        `tf.data.Dataset`.
    """

    def make(**common):
        return tf.raw_ops.ScanDataset(
            initial_state=state, preserve_cardinality=True, **common
        )

    return _Transformed(dataset, function, "Dataset.scan()", make, state=specs)


def interleave_on_host(dataset, function, *, cycle_length, block_length):
    """`dataset.interleave(function)`, each of a cycle in parallel, in order.

    Args:
        dataset: `tf.data.Dataset`.
        function: Function of an element that returns a dataset.
        cycle_length: Integer or `tf.data.AUTOTUNE`.
        block_length: Integer.

    Returns:
        `tf.data.Dataset`.
    """

    def make(**common):
        return tf.raw_ops.ParallelInterleaveDatasetV4(
            cycle_length=tf.constant(cycle_length, tf.int64),
            block_length=tf.constant(block_length, tf.int64),
            buffer_output_elements=tf.constant(tf.data.AUTOTUNE, tf.int64),
            prefetch_input_elements=tf.constant(tf.data.AUTOTUNE, tf.int64),
            num_parallel_calls=tf.constant(cycle_length, tf.int64),
            deterministic="true",
            **common,
        )

    return _Transformed(dataset, function, "Dataset.interleave()", make)
