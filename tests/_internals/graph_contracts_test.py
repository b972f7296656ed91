"""What stages and datasets rely on in graphs of TensorFlow and in tf.data."""

import glob
from unittest import mock

import keras
import tensorflow as tf

from tests._internals.contracts import holds
from tfscale._internals import attributes
from tfscale._internals import datasets
from tfscale._internals import symbols
from tfscale.graphs import dataset_graph
from tfscale.graphs import function_options
from tfscale.graphs import vectorized_map
from tfscale.variables import weight_gather


class GraphTest(tf.test.TestCase):
    @holds("ops.Operation", "_update_input")
    def test_an_operation_reads_another_tensor(self):
        @tf.function
        def run(x):
            product = x * 2.0
            attributes.replace_input(product.op, 0, x + 1.0)
            return product

        self.assertEqual(run(tf.constant(3.0)).numpy(), 8.0)

    def test_what_is_recomputed_is_known_by_its_traceback(self):
        @tf.function
        def run(x):
            y = keras.remat(lambda x: x * 2.0)(x)
            made = [op for op in y.graph.get_operations() if op.type == "Mul"]
            self.assertLen(list(filter(attributes.is_recomputed, made)), 1)
            self.assertFalse(attributes.is_recomputed((x * 2.0).op))
            return y

        run(tf.constant(3.0))

    @holds("eager.record", "could_possibly_record")
    def test_a_tape_that_is_around_may_record(self):
        x = tf.constant(3.0)

        @tf.custom_gradient
        def same(x):
            def backward(gradient):
                found.append(symbols.record.could_possibly_record())
                return gradient

            return tf.identity(x), backward

        @tf.function
        def run(x):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = same(x)
                tape.gradient(y, x)
                z = same(x)
            return outer.gradient(z, x)

        found = []
        run(x)
        self.assertEqual(found, [True, False])

    @holds("eager.record", "record_operation", "stop_recording")
    def test_a_tape_is_told_of_another_gradient(self):
        def seven_times(x):
            with symbols.record.stop_recording():
                y = tf.square(x)
            symbols.record.record_operation("", [y], [x], lambda dy: [7.0 * dy])
            return y

        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = seven_times(x)
            return tape.gradient(y, x)

        for run in (gradient, tf.function(gradient)):
            self.assertEqual(run(tf.constant(3.0)).numpy(), 7.0)

    def test_the_backward_of_a_tape_has_a_scope_of_its_own(self):
        @tf.function
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.square(x)
            names.append(y.op.name)
            gradient = tape.gradient(y, x)
            names.append(gradient.op.name)
            return gradient

        names = []
        run.get_concrete_function(tf.TensorSpec([2]))
        self.assertNotIn(weight_gather.BACKWARD, names[0])
        self.assertIn(weight_gather.BACKWARD, names[1])

    def test_an_iteration_of_a_vectorized_map_has_a_scope_of_its_own(self):
        @tf.function
        def run(x):
            def square(x):
                found.append(vectorized_map.is_of_iteration(x))
                found.append(vectorized_map.is_of_iteration(y))
                return tf.square(x) + y

            y = x[0] + 1.0
            return tf.vectorized_map(square, x)

        found = []
        run.get_concrete_function(tf.TensorSpec([2]))
        self.assertEqual(found, [True, False])

    @holds("cond_v2.cond_v2", "_add_control_dependencies")
    def test_branches_of_a_marked_graph_keep_their_side_effects(self):
        def kept(mark):
            counter = tf.Variable(0)

            def build():
                if mark:
                    attributes.keep_side_effects_of_branches(
                        tf.compat.v1.get_default_graph()
                    )

                def branch():
                    counter.assign_add(1)
                    return 1.0

                return tf.cond(tf.constant(True), branch, lambda: 2.0)

            tf.compat.v1.wrap_function(build, [])()
            return int(counter)

        self.assertEqual(kept(mark=True), 1)

    @holds("control_flow_util", "GraphOrParentsInXlaContext")
    @holds("polymorphic_function.Function.__init__", "_jit_compile")
    def test_what_xla_compiles_is_known(self):
        found = []

        @tf.function(jit_compile=True)
        def compiled():
            graph = tf.compat.v1.get_default_graph()
            found.append(symbols.is_compiled_by_xla(graph))
            return 1.0

        @tf.function
        def plain():
            graph = tf.compat.v1.get_default_graph()
            found.append(symbols.is_compiled_by_xla(graph))
            return 1.0

        compiled.get_concrete_function()
        plain.get_concrete_function()
        self.assertEqual(found, [True, False])
        self.assertTrue(attributes.asks_for_xla(compiled))
        wrapped = keras.Model()._autoconvert_optionals(compiled)
        self.assertTrue(attributes.asks_for_xla(wrapped))
        self.assertFalse(attributes.asks_for_xla(plain))
        self.assertFalse(attributes.asks_for_xla(len))

    @holds("Graph._create_op_helper", "_gradient_op_type")
    @holds("Operation.colocation_groups", "_class")
    @holds(
        "control_flow_util_v2.maybe_set_lowering_attr",
        "_lower_using_switch_merge",
    )
    def test_operations_are_marked(self):
        @tf.custom_gradient
        def double(x):
            return x * 2.0, lambda dy: dy

        graph = tf.Graph()
        with graph.as_default():
            x = tf.compat.v1.placeholder(tf.float32, (3,))
            double(x)
            with tf.compat.v1.colocate_with(x):
                tf.identity(x, name="beside")
            tf.while_loop(lambda i: i < 2, lambda i: i + 1, [0])
        nodes = graph.as_graph_def(add_shapes=True).node
        marked = {
            name: [node for node in nodes if name in node.attr]
            for name in (
                attributes.GRADIENT_TYPE,
                attributes.COLOCATED_WITH,
                attributes.LOWERED,
            )
        }
        self.assertEqual(
            {n.op for n in marked[attributes.GRADIENT_TYPE]}, {"IdentityN"}
        )
        self.assertEqual(
            [n.name for n in marked[attributes.COLOCATED_WITH]], ["beside"]
        )
        self.assertIn("While", {n.op.removeprefix("Stateless") for n in nodes})
        for node in marked[attributes.LOWERED]:
            self.assertIn("While", node.op)
        self.assertNotEmpty(marked[attributes.LOWERED])
        (shape,) = nodes[0].attr[attributes.OUTPUT_SHAPES].list.shape
        self.assertEqual(shape.dim[0].size, 3)

    @holds("context.Context", "get_config_key_value", "set_config_key_value")
    def test_workers_tell_each_other_by_a_service(self):
        # What comes of it is seen in tests/mesh/workers_test.py.
        with self.assertRaisesRegex(tf.errors.OpError, "oordination"):
            attributes.put_key_value("a", "b")
        with self.assertRaisesRegex(tf.errors.OpError, "oordination"):
            attributes.get_key_value("a", 1)

    @holds("context.Context", "abort_collective_ops")
    def test_exchanges_that_are_aborted_end_with_the_reason(self):
        # Other exchanges of this process would fail too: what it is called by
        # is seen in tests/cluster/lost_worker_test.py.
        context = symbols.eager_context.context()
        with mock.patch.object(context, "abort_collective_ops") as abort:
            attributes.abort_collectives("b is gone")
        abort.assert_called_once_with(tf.errors.ABORTED, "b is gone")

    @holds("context.Context", "configure_coordination_service")
    @holds("context.Context", "coordination_service")
    def test_all_workers_are_waited_for_so_long(self):
        # That TensorFlow then gives up is seen in tests/cluster.
        context = symbols.eager_context.context()
        with mock.patch.object(context, "_coordination_service_config", None):
            attributes.limit_joining({"worker": 2}, "/job:worker/task:0", 1.5)
            found = context.coordination_service
        self.assertEqual(found.cluster_register_timeout_in_ms, 1_500)
        self.assertTrue(found.cluster_register_with_barrier)
        (job,) = found.coordinated_job_list
        self.assertEqual((job.name, job.num_tasks), ("worker", 2))

    @holds("context.Context", "config")
    def test_options_of_a_process_are_those_of_its_context(self):
        before = tf.config.get_soft_device_placement()
        for is_soft in (not before, before):
            tf.config.set_soft_device_placement(is_soft)
            found = attributes.options_of_process()
            self.assertEqual(found.allow_soft_placement, is_soft)

    @holds("eager.context", "context")
    @holds("context.Context", "function_call_options")
    def test_functions_of_a_thread_are_run_by_its_options(self):
        context = symbols.eager_context.context()
        before = context.function_call_options
        with function_options.no_grappler():
            found = tf.compat.v1.ConfigProto.FromString(
                context.function_call_options.config_proto_serialized
            )
            self.assertTrue(
                found.graph_options.rewrite_options.disable_meta_optimizer
            )
            self.assertAllEqual(tf.function(lambda x: x + 1)(1), 2)
        self.assertIs(context.function_call_options, before)

    @holds("polymorphic_function.attributes", "NO_INLINE")
    def test_a_function_that_is_not_inlined_is_called(self):
        function = tf.function(
            lambda x: x + 1, experimental_attributes=attributes.NOT_INLINED
        )
        definition = function.get_concrete_function(1).function_def
        self.assertTrue(definition.attr[symbols.NO_INLINE].b)

    @holds("ops.Operation", "_set_attr")
    def test_an_operation_is_kept_outside_of_clusters(self):
        @tf.function
        def run(x):
            attributes.keep_outside_of_clusters((x * 2.0).op)
            return x

        graph = run.get_concrete_function(tf.constant(3.0)).graph
        (product,) = [op for op in graph.get_operations() if op.type == "Mul"]
        self.assertIs(product.get_attr("_XlaCompile"), False)

    @holds("xplane_pb2", "XSpace")
    def test_the_profiler_writes_planes_with_lines_of_events(self):
        folder = self.get_temp_dir()
        with (
            tf.profiler.experimental.Profile(folder),
            tf.profiler.experimental.Trace("traced", step_num=0, _r=1),
        ):
            tf.square(2.0)
        (path,) = glob.glob(f"{folder}/plugins/profile/*/*.xplane.pb")
        space = symbols.xplane_pb2.XSpace()
        with open(path, "rb") as file:
            space.ParseFromString(file.read())
        names = {
            plane.event_metadata[event.metadata_id].name
            for plane in space.planes
            for line in plane.lines
            for event in line.events
        }
        self.assertIn("traced", names)

    @holds("tf_optimizer", "OptimizeGraph")
    @holds("cluster", "Cluster")
    @holds("device_properties_pb2", "NamedDevice")
    def test_grappler_folds_what_is_constant_for_a_described_machine(self):
        graph = tf.Graph()
        with graph.as_default():
            x = tf.compat.v1.placeholder(tf.float32, (), name="x")
            y = tf.add(x, tf.constant(1.0) + tf.constant(2.0), name="y")
        meta = tf.compat.v1.MetaGraphDef(graph_def=graph.as_graph_def())
        meta.collection_def["train_op"].node_list.value.extend(["x", "y"])
        config = tf.compat.v1.ConfigProto()
        config.graph_options.rewrite_options.min_graph_nodes = -1
        device = symbols.device_properties.NamedDevice(
            name="/job:localhost/replica:0/task:0/device:CPU:0",
            properties={"type": "CPU", "environment": {"a": "b"}},
        )
        self.assertEqual(device.properties.environment, {"a": "b"})
        cluster = symbols.grappler_cluster.Cluster(devices=[device])
        found = symbols.tf_optimizer.OptimizeGraph(
            config, meta, cluster=cluster
        )
        self.assertLess(len(found.node), len(graph.as_graph_def().node))
        self.assertIn(y.op.name, [node.name for node in found.node])


class DatasetTest(tf.test.TestCase):
    @holds("_ParallelMapDataset.__init__", "_num_parallel_calls")
    @holds("_ParallelInterleaveDataset.__init__", "_num_parallel_calls")
    @holds("_ShuffleDataset.__init__", "_reshuffle_each_iteration")
    def test_settings_of_a_dataset_are_known(self):
        numbers = tf.data.Dataset.range(3)
        for dataset, name, setting in (
            (numbers.map(lambda x: x, 2), "num_parallel_calls", 2),
            (
                numbers.interleave(
                    tf.data.Dataset.from_tensors, num_parallel_calls=2
                ),
                "num_parallel_calls",
                2,
            ),
            (numbers.shuffle(4), "reshuffle_each_iteration", True),
        ):
            self.assertEqual(datasets.settings_of(dataset)[name], setting)

    @holds("_ParallelMapDataset.__init__", "_deterministic")
    def test_what_has_no_order_is_known(self):
        numbers = tf.data.Dataset.range(3)
        generated = tf.data.Dataset.from_generator(
            lambda: iter(range(3)), output_signature=tf.TensorSpec([])
        )
        for dataset, reason in (
            (numbers.map(lambda x: x + 1, 2).batch(2), "None"),
            (numbers.map(lambda x: x, 2, deterministic=False), "determ"),
            (generated.batch(2), "PyDataset"),
        ):
            found = dataset_graph.without_order(dataset)
            self.assertIn(reason, str(found))

    @holds("_ShuffleDataset.__init__", "_seed", "_seed2")
    def test_seeds_of_shuffles_are_known(self):
        numbers = tf.data.Dataset.range(3)
        seeds = dataset_graph.shuffle_seeds

        def within(**seed):
            return numbers.interleave(
                lambda x: tf.data.Dataset.range(x).shuffle(2, **seed)
            )

        def at_once(**seed):
            return numbers.batch(3).map(lambda x: tf.random.shuffle(x, **seed))

        tf.random.set_seed(None)
        self.assertEqual(seeds(numbers.shuffle(2).batch(2)), [(0, 0)])
        self.assertEqual(seeds(within()), [(0, 0)])
        self.assertEqual(seeds(at_once()), [(0, 0)])
        for made in (
            lambda: numbers.shuffle(2, seed=5),
            lambda: within(seed=5),
            lambda: at_once(seed=5),
        ):
            found = seeds(made())
            self.assertNotIn((0, 0), found)
            self.assertEqual(seeds(made()), found)
        self.assertLen(seeds(numbers.shuffle(2, seed=5)), 1)

    @holds("_BatchDataset.__init__", "_batch_size")
    @holds("_ParallelBatchDataset.__init__", "_batch_size")
    def test_sizes_of_batches_are_known(self):
        numbers = tf.data.Dataset.range(15)
        for made in (
            lambda size: numbers.batch(size).prefetch(1),
            lambda size: numbers.batch(size, num_parallel_calls=2),
        ):
            six, seven = (dataset_graph.batch_sizes(made(n)) for n in (6, 7))
            self.assertIn(6, six)
            self.assertIn(7, seven)
            self.assertEqual(dataset_graph.batch_sizes(made(6)), six)

    @holds("DatasetV2", "_inputs", "_functions", "_common_args")
    @holds("DatasetV2._metadata", "_name")
    @holds("structured_function", "StructuredFunctionWrapper")
    def test_a_dataset_is_an_operation_with_inputs_and_functions(self):
        numbers = tf.data.Dataset.range(3)
        doubled = numbers.map(lambda x: x * 2, name="doubling")
        self.assertEqual(datasets.inputs_of(doubled), [numbers])

        class Same(tf.data.Dataset):
            def __init__(self, dataset):
                self.dataset = dataset
                super().__init__(tf.data.experimental.to_variant(dataset))

            def _inputs(self):
                return [self.dataset]

            @property
            def element_spec(self):
                return self.dataset.element_spec

        self.assertEqual(dataset_graph.shuffle_seeds(doubled), [])
        same = Same(doubled)
        self.assertEqual([int(x) for x in same], [0, 2, 4])
        self.assertEqual(datasets.inputs_of(same.batch(2)), [same])

        class Mapped(Same):
            def __init__(self, dataset, function):
                self.dataset = dataset
                self._name = "own"
                self.function = symbols.StructuredFunctionWrapper(
                    function,
                    "Dataset.map()",
                    dataset=dataset,
                    defun_kwargs={"experimental_ints_on_device": True},
                )
                tf.data.Dataset.__init__(
                    self,
                    tf.raw_ops.MapDataset(
                        input_dataset=tf.data.experimental.to_variant(dataset),
                        other_arguments=[],
                        f=self.function.function,
                        **self._common_args,
                    ),
                )

            def _functions(self):
                return [self.function]

            @property
            def element_spec(self):
                return self.function.output_structure

        mapped = Mapped(numbers, lambda x: x + 1)
        self.assertEqual([int(x) for x in mapped], [1, 2, 3])
        self.assertIn(b"own", mapped._common_args["metadata"])
        # tf.data asks for the functions when it writes down a dataset.
        asked = []

        class Asked(Mapped):
            def _functions(self):
                asked.append(self)
                return super()._functions()

        dataset = Asked(numbers, lambda x: x + 1)
        dataset._trace_variant_creation()
        self.assertEqual(asked, [dataset])


if __name__ == "__main__":
    tf.test.main()
