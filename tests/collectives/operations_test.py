"""What tfscale calls: by which algorithm, and that all sums go through it."""

import ast
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import source_files
from tfscale.collectives import algorithms
from tfscale.collectives import costs
from tfscale.collectives import device_names
from tfscale.collectives import links
from tfscale.collectives import operations
from tfscale.collectives import rank_collectives as ranks
from tfscale.collectives import replica_collectives


def on_devices(x, device="CPU"):
    tensors = []
    for index, array in enumerate(x):
        with tf.device(f"/device:{device}:{index}"):
            tensors.append(tf.constant(array))
    return tensors


class NumbersTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(1, 2, 3, 8)
    def test_auto(self, num_devices):
        x = np.random.RandomState(0).randint(-50, 50, [num_devices] * 2 + [3])
        x = x.astype("float32")
        total = x.sum(axis=0)
        for found in operations.all_reduce(on_devices(x)):
            self.assertAllEqual(found, total)
        found = operations.reduce_scatter(on_devices(x), 0)
        for part, expected in zip(found, np.split(total, num_devices)):
            self.assertAllEqual(part, expected)
        self.assertAllEqual(operations.reduce(on_devices(x)), total)
        for found in operations.all_gather(on_devices(x), 1):
            self.assertAllEqual(found, np.concatenate(list(x), axis=1))


class MachinesTest(parameterized.TestCase):
    """Which algorithm is taken where devices lie on several machines."""

    @parameterized.parameters(
        ((0, 0, 0, 0), None),
        ((0, 1, 2), None),
        ((0, 0, 1, 1), 2),
        ((0, 0, 0, 1, 1, 1), 3),
        ((0, 1, 0, 1), None),  # those of a machine do not follow each other
        ((0, 0, 1), None),
    )
    def test_devices_of_a_machine_go_first_where_it_has_several(
        self, machines, size
    ):
        devices = [
            f"/job:worker/replica:0/task:{machine}/device:CPU:{index}"
            for index, machine in enumerate(machines)
        ]
        self.assertEqual(device_names.machines(tuple(devices)), machines)
        with mock.patch.object(links, "_measured", lambda _: (1e-3, 1e9)):
            links.costs.cache_clear()
            with tf.Graph().as_default():
                tensors = []
                for device in devices:
                    with tf.device(device):
                        tensors.append(tf.zeros([1 << 20]))
                with mock.patch.object(
                    algorithms, "two_shot", wraps=algorithms.two_shot
                ) as two_shot:
                    operations.all_reduce(tensors)
            if size:
                two_shot.assert_called_once_with(mock.ANY, size)
            elif len(set(machines)) == len(machines):
                self.assertEqual(operations.fastest(tensors), "two_shot")
            links.costs.cache_clear()

    def test_links_that_are_slow_to_answer_get_whole_tensors(self):
        # The size from which two rounds pay is latency times bandwidth.
        devices = tuple(
            f"/job:worker/replica:0/task:{task}/device:CPU:0"
            for task in range(4)
        )
        for latency, name in ((1e-3, "direct"), (1e-5, "two_shot")):
            links.costs.cache_clear()
            measured = mock.Mock(return_value=(latency, 1e9))
            with mock.patch.object(links, "_measured", measured):
                found = costs.fastest(links.costs(devices), 4, 256 << 10)
            self.assertEqual(found, name)
        links.costs.cache_clear()


def cores(count):
    """Within it, the process may use so many cores."""
    return mock.patch.object(costs, "_usable_cores", lambda: count)


def sums_of(step):
    """The shapes that are added up in the graph of a step."""
    graph = tf.function(step, autograph=False).get_concrete_function().graph
    return [
        op.outputs[0].shape.as_list()
        for op in graph.get_operations()
        if op.type == "AddN" and len(op.inputs) > 1
    ]


# Terms that one device has, or stages of one replica: nothing that replicas or
# model ranks sum.
OF_ONE_DEVICE = {
    "backup/state/variables.py": "values in a backup",
    "mesh/update/clipping.py": "squares of gradients",
    "mesh/gradient_noise.py": "squares of gradients",
    "pipeline/running/batch.py": "terms of losses",
    "pipeline/running/step.py": "gradients of a variable that stages share",
    "pipeline/tracing/stage_graph.py": "terms of losses",
}
SEAM = {
    "collectives/algorithms.py": "on devices of a process, or by NCCL",
    "collectives/workers.py": "between processes",
}


def adds_up(node):
    """Whether it is an operation that adds up, or exchanges, tensors."""
    return isinstance(node, ast.Attribute) and (
        node.attr in ("add_n", "AddN", "accumulate_n", "AccumulateNV2")
        or node.attr.startswith(("Nccl", "Collective"))
    )


class SeamTest(tf.test.TestCase, parameterized.TestCase):
    """Sums of replicas and of ranks, in the graph that is traced for them."""

    def test_nothing_else_adds_up_what_devices_have(self):
        found = {
            path.removeprefix("tfscale/")
            for path in source_files.python_files()
            if path.startswith("tfscale/")
            and any(map(adds_up, ast.walk(source_files.parse(path))))
        }
        self.assertEqual(found, {*OF_ONE_DEVICE, *SEAM})

    @parameterized.product(
        way=["replicas", "replicas_of_zero", "ranks"], num_devices=[2, 4]
    )
    def test_large_sums_are_made_in_parts(self, way, num_devices):
        axis = "model" if way == "ranks" else "data"
        strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(**{axis: num_devices}),
            {} if way == "ranks" else None,
        )

        def replica():
            x = tf.zeros((1024, 1024)) + tf.cast(1, tf.float32)
            if way == "ranks":
                return ranks.sum_over_ranks(x)
            if way == "replicas_of_zero":
                return replica_collectives.sum_over_replicas(x)
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, x)

        with cores(num_devices):
            shapes = sums_of(lambda: strategy.run(replica))
        self.assertLen(shapes, num_devices)
        for shape in shapes:
            if num_devices == 2:
                self.assertEqual(shape, [1024, 1024])
            else:
                self.assertEqual(np.prod(shape), 1024 * 1024 / num_devices)
        if num_devices == 4:
            with cores(2):
                shapes = sums_of(lambda: strategy.run(replica))
            self.assertEqual(shapes, [[1024, 1024]])

    def test_small_sums_are_made_on_each_device(self):
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=4))

        def replica():
            context = tf.distribute.get_replica_context()
            x = tf.zeros(16) + tf.cast(1, tf.float32)
            return context.all_reduce(tf.distribute.ReduceOp.MEAN, x)

        with cores(8):
            shapes = sums_of(lambda: strategy.run(replica))
        self.assertEqual(shapes, [[16]] * 4)


class NcclTest(tf.test.TestCase):
    """The graph only: there is no GPU where these tests run."""

    def setUp(self):
        super().setUp()
        self.gpus = ["GPU:0", "GPU:1"]
        for name, value in (
            ("tensorflow.test.is_built_with_cuda", lambda: True),
            ("tensorflow.config.list_logical_devices", lambda kind: self.gpus),
            (
                "tensorflow.config.list_physical_devices",
                lambda kind: ["GPU:0", "GPU:1"],
            ),
        ):
            patch = mock.patch(name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def test_gpus_are_reduced_by_one_collective(self):
        with tf.Graph().as_default():
            x = on_devices(np.ones((2, 3), "float32"), "GPU")
            for _ in range(2):
                totals = operations.all_reduce(x)
                self.assertEqual(
                    [total.device for total in totals], [t.device for t in x]
                )
                self.assertEqual(
                    {total.op.type for total in totals}, {"NcclAllReduce"}
                )
            graph = tf.compat.v1.get_default_graph()
            names = [
                op.get_attr("shared_name")
                for op in graph.get_operations()
                if op.type == "NcclAllReduce"
            ]
            self.assertEqual(names[0], names[1])
            self.assertEqual(names[2], names[3])
            self.assertNotEqual(names[0], names[2])

    def test_parts_of_a_chip_other_dtypes_and_hosts_are_not(self):
        with tf.Graph().as_default():
            x = np.ones((2, 3), "float32")
            self.assertTrue(algorithms.can_use_nccl(on_devices(x, "GPU")))
            self.assertFalse(algorithms.can_use_nccl(on_devices(x, "CPU")))
            self.assertFalse(
                algorithms.can_use_nccl(on_devices(x.astype("int8"), "GPU"))
            )
            self.gpus = ["GPU:0", "GPU:1", "GPU:2"]
            self.assertFalse(algorithms.can_use_nccl(on_devices(x, "GPU")))

    def test_nothing_is_run_alone(self):
        x = [mock.Mock(dtype=tf.float32, device="GPU:0")] * 2
        self.assertFalse(algorithms.can_use_nccl(x))


if __name__ == "__main__":
    tf.test.main()
