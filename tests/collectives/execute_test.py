"""Plans on virtual devices: the numbers of NumPy, each on its device."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests.collectives import numpy_collectives
from tfscale import collectives
from tfscale.collectives.execute import execute
from tfscale.collectives.planning import algorithms


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


class ExecuteTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*range(1, 10))
    @pytest.mark.crossing(every=4)
    def test_every_algorithm_and_operation(self, num_devices):
        # As a graph of all of them: one trace.
        plans = numpy_collectives.plans(num_devices)
        x = [numpy_collectives.inputs(plan) for plan in plans]
        places = {}

        @tf.function(autograph=False)
        def step():
            results = {}
            for index, plan in enumerate(plans):
                found = execute(plan, on_devices(x[index]))
                results[index] = {
                    device: tensor
                    for device, tensor in enumerate(found)
                    if tensor is not None
                }
                for device, tensor in results[index].items():
                    places[index, device] = tensor.device
            return results

        results = step()
        for index, plan in enumerate(plans):
            expected = numpy_collectives.expected(plan, x[index])
            for device, wanted in enumerate(expected):
                found = results[index].get(device)
                if wanted is None:
                    self.assertIsNone(found)
                    continue
                np.testing.assert_array_equal(found, wanted, str(plan))
                self.assertEqual(
                    places[index, device], devices(num_devices)[device]
                )

    @parameterized.parameters(3, 8)
    def test_rounded_sums_are_those_of_the_plan(self, num_devices):
        for plan in numpy_collectives.plans(num_devices):
            if plan.operation == "all_reduce":
                # 16 columns: cut in aligned rows.
                for columns in (3, 16):
                    x = numpy_collectives.inputs(plan, columns, integers=False)
                    found = execute(plan, on_devices(x))
                    expected = numpy_collectives.play(plan, x)[0]
                    for tensor in found:
                        self.assertEqual(tensor.shape, expected.shape)
                        self.assertAllEqual(tensor, found[0])
                    self.assertAllClose(found[0], expected, rtol=1e-6)

    def test_what_is_chosen_between_has_the_same_digits(self):
        names = ("direct", "two_shot", "parameter_server")
        for num_devices in (3, 8):
            plans = [
                getattr(algorithms, name)("all_reduce", num_devices)
                for name in names
            ]
            for columns in (3, 16):
                x = numpy_collectives.inputs(plans[0], columns, integers=False)
                totals = [execute(plan, on_devices(x)) for plan in plans]
                for total in itertools.chain(*totals):
                    np.testing.assert_array_equal(total, totals[0][0])

    def test_a_direct_sum_is_the_one_operation_that_it_was(self):
        # One AddN on each device, of what there is: nothing is copied.
        plan = collectives.direct("all_reduce", 2)

        @tf.function(autograph=False)
        def step():
            return execute(plan, on_devices(np.ones((2, 4))))

        graph = step.get_concrete_function().graph
        types = [op.type for op in graph.get_operations()]
        self.assertEqual(types.count("AddN"), 2)
        self.assertEqual(types.count("Identity"), 2)  # the function's results

    def test_between_devices_goes_what_the_plan_says(self):
        num_devices = 6
        # TensorFlow sends a tensor once to each device that uses it.
        for plan in numpy_collectives.plans(num_devices):
            x = numpy_collectives.inputs(plan, columns=32 * num_devices)

            with tf.Graph().as_default() as graph:
                execute(plan, on_devices(x))
            places = {name: i for i, name in enumerate(devices(num_devices))}
            sent, sizes = set(), {}
            for op in graph.get_operations():
                for tensor in op.inputs:
                    source, target = tensor.op.device, op.device
                    if {source, target} <= set(places) and source != target:
                        sent.add((target, tensor.name))
                        sizes[tensor.name] = tensor.shape.num_elements()
            received = [0] * num_devices
            for target, name in sent:
                received[places[target]] += sizes[name]
            whole = x[0].size
            if plan.operation == "all_gather":
                whole *= num_devices
            self.assertEqual(
                received,
                [n * whole / plan.num_chunks for n in plan.chunks_received],
                f"{plan.name} {plan.operation}",
            )

    @parameterized.parameters(collectives.two_shot, numpy_collectives.ring)
    def test_sizes_that_are_known_later(self, make):
        plan = make("all_reduce", 3)
        spec = tf.TensorSpec((None, None))

        @tf.function(autograph=False, input_signature=[spec] * 3)
        def step(*tensors):
            return execute(plan, on_devices(tensors))

        for shape in ((5, 7), (1, 1), (0, 2)):
            x = np.random.RandomState(0).randint(-9, 9, (3, *shape))
            x = x.astype("float32")
            for total in step(*x):
                self.assertAllEqual(total, x.sum(axis=0))

    def test_scalars_and_other_dtypes(self):
        plan = collectives.two_shot("all_reduce", 4)
        for dtype in ("int32", "float64", "bfloat16"):
            tensors = [tf.cast(value, dtype) for value in range(4)]
            for total in execute(plan, on_devices(tensors)):
                self.assertEqual(total.shape, ())
                self.assertAllEqual(total, tf.cast(6, dtype))

    def test_other_dims_and_parts_of_different_sizes(self):
        x = np.arange(24.0).reshape((2, 3, 4))
        plan = collectives.direct("reduce_scatter", 2)
        found = execute(plan, on_devices(x), dim=-1)
        expected = np.split(x.sum(axis=0), 2, axis=-1)
        self.assertAllEqual(found[1], expected[1])
        parts = [tf.ones((2, 1)), tf.zeros((2, 5))]
        plan = collectives.direct("all_gather", 2)
        found = execute(plan, on_devices(parts), dim=1)
        self.assertAllEqual(found[0], np.concatenate(parts, axis=1))


class BadInputTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(
        ("devices", "all_reduce", [[1.0]] * 3, {}, "3 tensors for a plan of 2"),
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
    )
    def test_is_refused(self, operation, tensors, options, text):
        plan = collectives.direct(operation, 2)
        tensors = [tf.constant(tensor) for tensor in tensors]
        with self.assertRaisesRegex(ValueError, text):
            execute(plan, tensors, **options)


if __name__ == "__main__":
    tf.test.main()
