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

    def __init__(self, dataset, function, kind, make, name=None):
        self._dataset = dataset
        self._name = name  # where tf.data looks for it
        self._function = _internals.StructuredFunctionWrapper(
            tf.autograph.experimental.do_not_convert(function),
            kind,
            dataset=dataset,
            defun_kwargs=dict(_ONE_DEVICE),
        )
        spec = self._function.output_structure
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


def map_on_host(dataset, function, *, ahead=False, name=None):
    """`dataset.map(function)`.

    Args:
        dataset: `tf.data.Dataset`.
        function: Function of an element.
        ahead: Whether it is called in a thread of its own.
        name: String, of the transformation.

    Returns:
        `tf.data.Dataset`.
    """

    def make(**common):
        if not ahead:
            return tf.raw_ops.MapDataset(preserve_cardinality=True, **common)
        return tf.raw_ops.ParallelMapDatasetV2(
            num_parallel_calls=tf.constant(1, tf.int64),
            preserve_cardinality=True,
            **common,
        )

    return _Transformed(dataset, function, "Dataset.map()", make, name)


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
