"""Maps whose functions are marked for one device: as `Dataset.map`, sooner."""

import numpy as np
import tensorflow as tf

from tfscale import data
from tfscale.data import single_device


def _marked(dataset):
    """Dict from a transformation's name to whether its function is marked."""
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=1,  # state is copied, silently
    )
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    functions = {f.signature.name: f for f in graph.library.function}
    marked = {}
    for node in graph.node:
        function = functions.get(node.attr["f"].func.name)
        if function is not None:
            name = node.attr["metadata"].s.split(b"\n")[-1][1:].decode()
            marked[name] = "experimental_ints_on_device" in function.attr
    return marked


def test_map_passes_structures_on_as_map_does():
    numbers = tf.data.Dataset.range(3)

    def function(number):
        return {
            "number": number + 1,
            "ragged": tf.ragged.range([number, 2]),
            "text": (tf.strings.as_string(number),),
        }

    plain = numbers.map(function)
    for calls in (None, 1, tf.data.AUTOTUNE):
        mapped = single_device.map_on_host(
            numbers, function, num_parallel_calls=calls
        )
        assert mapped.element_spec == plain.element_spec
        assert int(mapped.cardinality()) == 3
        for one, other in zip(mapped, plain, strict=True):
            assert int(one["number"]) == int(other["number"])
            assert one["ragged"].to_list() == other["ragged"].to_list()
            assert one["text"][0].numpy() == other["text"][0].numpy()


def test_map_unpacks_tuples_and_captures():
    pairs = tf.data.Dataset.from_tensor_slices((np.arange(3), np.arange(3)))
    table = tf.constant([10, 20, 30], tf.int64)
    mapped = single_device.map_on_host(pairs, lambda a, b: table[a] + b)
    assert list(mapped.as_numpy_iterator()) == [10, 21, 32]


def test_scan_is_scan():
    def function(state, number):
        total = state[0] + number
        return (total,), (total, number)

    numbers = tf.data.Dataset.range(5)
    zero = tf.constant(0, tf.int64)
    ours = single_device.scan_on_host(
        numbers, [zero], (tf.TensorSpec([], tf.int64),), function
    )
    theirs = numbers.scan((zero,), function)
    assert ours.element_spec == theirs.element_spec
    assert int(ours.cardinality()) == 5
    assert list(ours.as_numpy_iterator()) == list(theirs.as_numpy_iterator())


def test_interleave_keeps_the_order_of_interleave():
    def lines(number):
        return tf.data.Dataset.range(number, number + 5)

    numbers = tf.data.Dataset.range(0, 70, 10)
    arguments = dict(cycle_length=3, block_length=2)
    ours = single_device.interleave_on_host(numbers, lines, **arguments)
    theirs = numbers.interleave(lines, **arguments)
    assert ours.element_spec == theirs.element_spec
    assert list(ours.as_numpy_iterator()) == list(theirs.as_numpy_iterator())


def test_our_functions_are_marked_and_a_users_are_not(tmp_path):
    path = str(tmp_path / "a.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for number in range(8):
            writer.write(b"%d" % number)
    sources = {
        "arrays": (data.arrays(np.arange(8)), {"position", "steps", "order"}),
        "tfrecords": (data.tfrecords(path), {"position", "read"}),
    }
    for source, ours in sources.values():
        pipeline = data.pipeline(
            source, batch_size=2, parse=lambda x: x, cache="none"
        )
        marked = _marked(pipeline)
        assert not marked["record"]
        assert all(marked[name] for name in ours | {"deliver"})
