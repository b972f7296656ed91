"""Algorithms on virtual devices: the numbers of NumPy, and what is sent."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tfscale.collectives import algorithms
from tfscale.collectives import operations


def devices(count):
    """Names of so many; there are eight, of which one may be there twice."""
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    return [names[i % len(names)] for i in range(count)]


def on_devices(x):
    tensors = []
    for device, array in zip(devices(len(x)), x):
        with tf.device(device):
            is_tensor = tf.is_tensor(array)
            tensors.append((tf.identity if is_tensor else tf.constant)(array))
    return tensors


def machines(count):
    """The numbers of devices of a machine that there may be."""
    return [size for size in range(1, count + 1) if count % size == 0]


def all_reduces(count):
    """All algorithms, by name."""
    return algorithms.ALL_REDUCE | {
        f"machines of {size}": functools.partial(
            algorithms.two_shot, machine=size
        )
        for size in machines(count)
    }


def rounded(count, columns):
    shape = (count, count, columns)
    return np.random.RandomState(0).normal(size=shape).astype("float32")


def elements_received(count, x, exchange):
    """Elements that each device gets; a tensor is sent once to a device."""
    with tf.Graph().as_default() as graph:
        exchange(on_devices(x))
    places = {name: i for i, name in enumerate(devices(count))}
    sizes = {}
    for op in graph.get_operations():
        for tensor in op.inputs:
            ends = {tensor.op.device, op.device}
            if ends <= set(places) and len(ends) == 2:
                sizes[op.device, tensor.name] = tensor.shape.num_elements()
    received = [0] * count
    for (device, _), size in sizes.items():
        received[places[device]] += size
    return received


class NumbersTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*range(2, 10))
    @pytest.mark.crossing(every=4)
    def test_every_algorithm_and_operation(self, count):
        x = np.random.RandomState(0).randint(-50, 50, (count, count, 3))
        x = x.astype("float32")
        total = x.sum(axis=0)
        expected, places = {}, {}

        # As a graph of all of them: one trace.
        @tf.function(autograph=False)
        def step():
            results = {}

            def add(name, tensors, wanted):
                results[name] = list(tensors)
                places[name] = [tensor.device for tensor in tensors]
                expected[name] = wanted

            for name, make in all_reduces(count).items():
                add(name, make(on_devices(x)), [total] * count)
            for size in machines(count):
                found = algorithms.reduce_scatter(on_devices(x), 0, size)
                add(f"scatter {size}", found, np.split(total, count))
                found = algorithms.all_gather(on_devices(x), 1, size)
                whole = np.concatenate(list(x), axis=1)
                add(f"gather {size}", found, [whole] * count)
                found = [algorithms.reduce(on_devices(x), size)]
                add(f"reduce {size}", found, [total])
            return results

        for name, found in step().items():
            self.assertEqual(places[name], devices(len(found)), name)
            for tensor, wanted in zip(found, expected[name], strict=True):
                np.testing.assert_array_equal(tensor, wanted, name)

    @parameterized.product(count=[3, 8], columns=[3, 16])
    def test_what_is_chosen_between_has_the_same_digits(self, count, columns):
        # 16 columns: cut in aligned rows.
        x = rounded(count, columns)
        expected = x[0]
        for each in x[1:]:  # in the order of devices
            expected = expected + each
        totals = [
            make(on_devices(x)) for make in algorithms.ALL_REDUCE.values()
        ]
        for total in itertools.chain(*totals):
            np.testing.assert_array_equal(total, totals[0][0])
        self.assertAllClose(totals[0][0], expected, rtol=1e-6)

    @parameterized.parameters(3, 8)
    def test_rounded_sums_are_equal_on_all_devices_and_in_all_operations(
        self, count
    ):
        for size in machines(count):
            x = rounded(count, 16)
            wholes = algorithms.two_shot(on_devices(x), size)
            for whole in wholes:
                np.testing.assert_array_equal(whole, wholes[0])
            np.testing.assert_array_equal(
                algorithms.reduce(on_devices(x), size), wholes[0]
            )
            parts = algorithms.reduce_scatter(on_devices(x), 0, size)
            np.testing.assert_array_equal(tf.concat(parts, 0), wholes[0])

    def test_a_direct_sum_is_one_operation_on_each_device(self):
        # One AddN on each device, of what there is: nothing is copied.
        @tf.function(autograph=False)
        def step():
            return algorithms.direct(on_devices(np.ones((2, 4))))

        graph = step.get_concrete_function().graph
        types = [op.type for op in graph.get_operations()]
        self.assertEqual(types.count("AddN"), 2)
        self.assertEqual(types.count("Identity"), 2)  # the function's results

    @parameterized.parameters(algorithms.two_shot, algorithms.direct)
    def test_sizes_that_are_known_later(self, make):
        spec = tf.TensorSpec((None, None))

        @tf.function(autograph=False, input_signature=[spec] * 3)
        def step(*tensors):
            return make(on_devices(tensors))

        for shape in ((5, 7), (1, 1), (0, 2)):
            x = np.random.RandomState(0).randint(-9, 9, (3, *shape))
            x = x.astype("float32")
            for total in step(*x):
                self.assertAllEqual(total, x.sum(axis=0))

    def test_scalars_and_other_dtypes(self):
        for dtype in ("int32", "float64", "bfloat16"):
            tensors = [tf.cast(value, dtype) for value in range(4)]
            for total in algorithms.two_shot(on_devices(tensors)):
                self.assertEqual(total.shape, ())
                self.assertAllEqual(total, tf.cast(6, dtype))

    def test_other_dims_and_parts_of_different_sizes(self):
        x = np.arange(24.0).reshape((2, 3, 4))
        found = operations.reduce_scatter(on_devices(x), -1)
        expected = np.split(x.sum(axis=0), 2, axis=-1)
        self.assertAllEqual(found[1], expected[1])
        parts = [tf.ones((2, 1)), tf.zeros((2, 5))]
        found = operations.all_gather(on_devices(parts), 1)
        self.assertAllEqual(found[0], np.concatenate(parts, axis=1))


class SentTest(tf.test.TestCase, parameterized.TestCase):
    """Closed forms of the literature, in parts of the whole tensor."""

    @parameterized.parameters(2, 6)
    def test_between_devices(self, n):
        x = np.zeros((n, 16 * n), "float32")
        part = (n - 1) / n
        for exchange, expected in (
            (algorithms.direct, [n - 1] * n),
            (algorithms.two_shot, [2 * part] * n),
            (algorithms.parameter_server, [n - 1] + [1] * (n - 1)),
            (algorithms.reduce, [n - 1] + [0] * (n - 1)),
            (lambda x: algorithms.reduce_scatter(x, 0), [part] * n),
            (lambda x: algorithms.all_gather(x, 0), [n - 1] * n),
        ):
            received = elements_received(n, x, exchange)
            self.assertAllClose(np.array(received) / x[0].size, expected)

    @parameterized.parameters((2, 2), (4, 2), (2, 4))
    def test_between_machines(self, count, size):
        # Each device sends 2 (m - 1) / m of a machine's share: S / g.
        n = count * size
        x = np.zeros((n, 16 * n), "float32")
        inside, between = (size - 1) / size, (count - 1) / count / size
        received = elements_received(
            n, x, lambda x: algorithms.two_shot(x, size)
        )
        self.assertAllClose(
            np.array(received) / x[0].size, [2 * (inside + between)] * n
        )
        received = elements_received(
            n, x, lambda x: [algorithms.reduce(x, size)]
        )
        sums = [size - 1] + [0] * (size - 1)
        expected = np.array(sums * count)
        expected[0] += count - 1
        self.assertAllClose(np.array(received) / x[0].size, expected)


class BadInputTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(
        ("shapes", "all_reduce", [[1.0], [1.0, 2.0]], {}, "one shape"),
        (
            "shapes_beside_dim",
            "all_gather",
            [[[1.0]], [[1.0, 2.0]]],
            {},
            "except for the concatenated dim",
        ),
        ("dtypes", "all_reduce", [[1], [1.0]], {}, "float32, int32"),
        ("indivisible", "reduce_scatter", [[1.0]] * 2, {}, "divide the dim"),
        ("dim", "all_gather", [[1.0]] * 2, {"dim": 1}, "dim=1 for shape"),
        ("dim_of_sum", "reduce_scatter", [[1.0]] * 2, {"dim": 1}, "dim=1 for"),
    )
    def test_is_refused(self, operation, tensors, options, text):
        tensors = [tf.constant(tensor) for tensor in tensors]
        with self.assertRaisesRegex(ValueError, text):
            getattr(operations, operation)(tensors, **options)


if __name__ == "__main__":
    tf.test.main()
