"""What strategies and variables of a mesh rely on in those of TensorFlow."""

import tensorflow as tf

from tests._internals import check_test
from tests._internals.contracts import holds
from tests._internals.contracts import recording
from tfscale._internals import attributes
from tfscale._internals import datasets
from tfscale._internals import symbols
from tfscale._internals import symbols as private_symbols
from tfscale.collectives import device_names
from tfscale.graphs import noting_scope

DEVICES = ("/CPU:0", "/CPU:1")
SUM = tf.distribute.ReduceOp.SUM
# What a program on two replicas goes through; other names are attributes.
METHODS = check_test.names_in(".MirroredExtended")


class Recording(tf.distribute.Strategy):
    """A `MirroredStrategy` that tells which methods are called."""

    _collective_key_base = 7

    def __init__(self, calls, kind=private_symbols.MirroredExtended):
        kind = recording(kind, METHODS, calls)
        super().__init__(
            kind(self, DEVICES, tf.distribute.ReductionToOneDevice())
        )


class StrategyTest(tf.test.TestCase):
    def called(self, function):
        """What a function of a strategy calls, without repetitions."""
        calls = []
        strategy = Recording(calls)
        with strategy.scope():
            calls.clear()
            function(strategy)
        return list(dict.fromkeys(calls))

    @holds("MirroredExtended", "_in_multi_worker_mode")
    def test_a_dataset_of_workers_asks_all_of_them_for_rows(self):
        dataset = tf.data.Dataset.range(4).batch(2, drop_remainder=True)

        def run(strategy):
            iter(strategy.experimental_distribute_dataset(dataset))

        self.assertIn("_in_multi_worker_mode", self.called(run))

    @holds("MirroredExtended", "_create_variable")
    def test_a_variable_is_made_by_one_method(self):
        found = self.called(lambda strategy: tf.Variable(1.0))
        self.assertIn("_create_variable", found)

    @holds(
        "MirroredExtended",
        "_get_replica_id_in_sync_group",
        "_get_local_replica_id",
        "_num_replicas_in_sync",
        "_use_merge_call",
    )
    def test_a_run_goes_by_replicas_and_their_numbers(self):
        def run(strategy):
            def step():
                context = tf.distribute.get_replica_context()
                total = context.all_reduce(SUM, tf.constant([1.0]))
                self.assertAllEqual(total, [2.0])
                return context.num_replicas_in_sync

            strategy.run(step)

        found = self.called(run)
        for name in (
            "_get_replica_id_in_sync_group",
            "_get_local_replica_id",
            "_num_replicas_in_sync",
            "_use_merge_call",
        ):
            self.assertIn(name, found)

    @holds("MirroredExtended", "_replica_ctx_all_reduce", "_use_merge_call")
    def test_where_replicas_do_not_meet_they_sum_by_one_method(self):
        calls = []

        class NotMeeting(private_symbols.MirroredExtended):
            def _use_merge_call(self):
                return False

            def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
                calls.append("_replica_ctx_all_reduce")
                return value

        strategy = Recording([], NotMeeting)

        def step():
            context = tf.distribute.get_replica_context()
            context.all_reduce(SUM, tf.constant([1.0]))

        strategy.run(step)
        self.assertEqual(calls, ["_replica_ctx_all_reduce"] * 2)

    @holds("MirroredExtended", "_gather_to_implementation")
    def test_gathers_go_by_one_method(self):
        def gather(strategy):
            value = strategy.run(lambda: tf.constant([1.0]))
            found = strategy.gather(value, axis=0)
            self.assertAllEqual(found, [1.0, 1.0])

        self.assertIn("_gather_to_implementation", self.called(gather))

        def all_gather(strategy):
            strategy.run(
                lambda: tf.distribute.get_replica_context().all_gather(
                    tf.constant([1.0]), axis=0
                )
            )

        found = self.called(all_gather)
        self.assertIn("_gather_to_implementation", found)

    @holds("MirroredExtended", "_initialize_single_worker")
    @holds("MirroredExtended._initialize_single_worker", "_devices")
    def test_devices_of_a_machine_are_set_in_one_method(self):
        calls = []
        extended = Recording(calls).extended
        self.assertEqual(calls.count("_initialize_single_worker"), 1)
        self.assertLen(extended._devices, 2)

    @holds("mirrored_strategy", "MirroredExtended")
    def test_devices_have_full_names(self):
        devices = tuple(map(device_names.full_name, DEVICES))
        self.assertEqual(Recording([]).extended._devices, devices)

    @holds("input_lib", "DistributedDataset", "DistributedDatasetsFromFunction")
    def test_replicas_can_have_an_ordinary_iterator(self):
        strategy = tf.distribute.MirroredStrategy(["/CPU:0"])
        host = device_names.full_name("/CPU:0")
        workers = private_symbols.InputWorkers([(host, (host,))])
        options = datasets.ORDINARY_ITERATOR
        dataset = tf.data.Dataset.range(2)
        for made in (
            private_symbols.DistributedDataset(
                workers,
                strategy,
                dataset,
                num_replicas_in_sync=1,
                options=options,
            ),
            private_symbols.DistributedDatasetsFromFunction(
                workers,
                strategy,
                [tf.distribute.InputContext()],
                lambda _: dataset,
                options,
            ),
        ):
            self.assertEqual([int(x) for x in made], [0, 1])

    @holds(
        "input_lib",
        "DistributedIterator",
        "DistributedIteratorSpec",
        "InputWorkers",
    )
    @holds("DistributedIterator", "_type_spec")
    @holds(
        "DistributedIteratorBase.__init__",
        "_input_workers",
        "_iterators",
    )
    @holds(
        "DistributedIteratorSpec",
        "_component_specs",
        "_from_components",
        "_to_components",
    )
    def test_an_iterator_is_taken_by_a_function_as_one_of_each_worker(self):
        strategy = tf.distribute.MirroredStrategy(DEVICES)
        dataset = tf.data.Dataset.range(4).batch(2)
        iterator = iter(strategy.experimental_distribute_dataset(dataset))
        spec = iterator._type_spec
        self.assertIsInstance(spec, symbols.DistributedIteratorSpec)
        self.assertIsInstance(iterator, symbols.DistributedIterator)
        self.assertIsNot(spec, iterator._type_spec)
        parts = spec._to_components(iterator)
        self.assertLen(spec._component_specs, 1)
        self.assertIs(parts, iterator._iterators)
        workers = iterator._input_workers
        self.assertIsInstance(workers, private_symbols.InputWorkers)
        (host,) = workers.worker_devices
        devices = workers.compute_devices_for_worker(0)
        again = spec._from_components(parts)
        # As many workers as there are pairs, each with an iterator.
        again._input_workers = private_symbols.InputWorkers(
            [(host, devices)] * 2
        )
        again._iterators = [*parts, *parts]
        self.assertLen(again._type_spec._component_specs, 2)
        self.assertAllEqual(next(again).values, [[0], [1], [2], [3]])


class VariableTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.strategy = tf.distribute.MirroredStrategy(DEVICES)

    def made(
        self,
        kind=private_symbols.MirroredVariable,
        aggregation=tf.VariableAggregation.NONE,
    ):
        """A variable, of a subclass that is made out of components."""
        components = [
            noting_scope.plain_variable(tf.constant([1.0, 2.0]), device)
            for device in self.strategy.extended.worker_devices
        ]
        return kind(self.strategy, components, aggregation)

    @holds("values", "MirroredVariable", "SyncOnReadVariable")
    def test_a_variable_is_made_of_components(self):
        for kind in (
            private_symbols.MirroredVariable,
            private_symbols.SyncOnReadVariable,
        ):
            variable = self.made(kind)
            self.assertIsInstance(variable, tf.distribute.DistributedValues)
            self.assertLen(variable.values, 2)
        # One in the scope of no strategy is none's.
        with self.strategy.scope():
            plain = noting_scope.plain_variable(1.0)
        self.assertNotIsInstance(plain, tf.distribute.DistributedValues)

    @holds("MirroredVariable", "_dense_var_to_tensor", "_get_cross_replica")
    @holds("MirroredVariable", "_update_replica")
    @holds("DistributedVariable", "_update_cross_replica")
    def test_reads_and_writes_go_by_one_method_each(self):
        calls = []
        kind = recording(
            private_symbols.MirroredVariable,
            (
                "_dense_var_to_tensor",
                "_get_cross_replica",
                "_update_cross_replica",
                "_update_replica",
            ),
            calls,
        )
        variable = self.made(kind, aggregation=tf.VariableAggregation.MEAN)

        def called(function):
            calls.clear()
            function()
            return list(dict.fromkeys(calls))

        self.assertIn(
            "_dense_var_to_tensor",
            called(lambda: tf.convert_to_tensor(variable)),
        )
        self.assertIn(
            "_update_cross_replica",
            called(lambda: self.strategy.extended and self.assign(variable)),
        )
        self.assertIn(
            "_update_replica",
            called(
                lambda: self.strategy.run(
                    lambda: variable.assign(tf.constant([3.0, 4.0]))
                )
            ),
        )
        with self.strategy.scope():
            self.assertIn(
                "_get_cross_replica",
                called(lambda: variable.read_value()),
            )

    def assign(self, variable):
        with self.strategy.scope():
            variable.assign([5.0, 6.0])

    @holds("SyncOnReadVariable", "_get_cross_replica")
    def test_a_sum_is_read_by_one_method(self):
        calls = []
        kind = recording(
            private_symbols.SyncOnReadVariable, ("_get_cross_replica",), calls
        )
        variable = self.made(
            kind,
            aggregation=tf.VariableAggregation.SUM,
        )
        with self.strategy.scope():
            self.assertAllEqual(variable.read_value(), [2.0, 4.0])
        self.assertEqual(calls, ["_get_cross_replica"])

    @holds("Trackable", "_serialize_to_tensors", "_restore_from_tensors")
    @holds("DistributedVariable", "_export_to_saved_model_graph")
    def test_what_is_saved_and_restored_goes_by_one_method_each(self):
        names = ("_serialize_to_tensors", "_restore_from_tensors")
        calls = []

        class Saved(private_symbols.MirroredVariable):
            def _serialize_to_tensors(self):
                calls.append("_serialize_to_tensors")
                return {"VARIABLE_VALUE": self.values[0].read_value() * 2.0}

            def _restore_from_tensors(self, restored_tensors):
                calls.append("_restore_from_tensors")
                (value,) = restored_tensors.values()
                return [v.assign(value) for v in self.values]

            def _gather_saveables_for_checkpoint(self):
                return super()._gather_saveables_for_checkpoint()

        del Saved._gather_saveables_for_checkpoint
        variable = self.made(Saved)
        checkpoint = tf.train.Checkpoint(variable=variable)
        path = checkpoint.write(self.get_temp_dir() + "/checkpoint")
        checkpoint.read(path)
        self.assertContainsSubset(names, calls)
        self.assertAllEqual(variable.values[1], [2.0, 4.0])

        class NotExported(private_symbols.MirroredVariable):
            def _export_to_saved_model_graph(self, *args, **kwargs):
                raise ValueError("no export")

        module = tf.Module()
        module.variable = self.made(NotExported)
        with self.assertRaisesRegex(ValueError, "no export"):
            tf.saved_model.save(module, self.get_temp_dir() + "/model")

    @holds("PerReplicaSpec.__init__", "_value_specs")
    def test_replicas_get_what_the_spec_of_a_dataset_says(self):
        dataset = self.strategy.experimental_distribute_dataset(
            tf.data.Dataset.range(4).batch(4)
        )
        spec = dataset.element_spec
        self.assertEqual(spec._value_specs[0], tf.TensorSpec((None,), tf.int64))
        self.assertLen(spec._value_specs, 2)

    @holds("values_util", "get_current_replica_id_as_int")
    @holds("distribute_utils", "regroup")
    @holds("values", "Mirrored")
    def test_a_thread_knows_its_component(self):
        value = private_symbols.distribute_utils.regroup((1, 2))
        self.assertEqual(value.values, (1, 2))
        equal = private_symbols.distribute_utils.regroup(
            (tf.ones(()), tf.ones(())), wrap_class=private_symbols.Mirrored
        )
        self.assertIsInstance(equal, private_symbols.Mirrored)
        found = self.strategy.run(
            lambda x: tf.constant(
                [x, private_symbols.get_current_replica_id_as_int()]
            ),
            args=(value,),
        )
        self.assertAllEqual(
            self.strategy.experimental_local_results(found), [[1, 0], [2, 1]]
        )
        numbers = []
        variable = self.made()
        with self.strategy.scope():
            self.assertIsNone(private_symbols.get_current_replica_id_as_int())
            self.strategy.extended.update(
                variable,
                lambda v: numbers.append(
                    private_symbols.get_current_replica_id_as_int()
                ),
                group=False,
            )
        self.assertEqual(numbers, [0, 1])

    @holds("PerWorkerValues.__init__", "_values")
    def test_values_of_workers_are_taken_apart_and_put_together(self):
        class Value(tf.distribute.coordinator.RemoteValue):
            def fetch(self):
                raise NotImplementedError

            get = fetch

        kind = tf.distribute.coordinator.PerWorkerValue
        values = [kind([Value(), Value()]) for _ in range(2)]
        found = attributes.choose_worker_values(values)
        self.assertIsInstance(found, kind)
        self.assertIs(found._values[0], values[0]._values[0])
        self.assertIs(found._values[1], values[1]._values[1])

    @holds("coordinator.cluster_coordinator", "_is_worker_failure")
    def test_a_worker_is_lost_that_is_gone_or_knows_of_nothing(self):
        def fails(error, words):
            words = f"{words} remote target /job:worker/replica:0/task:0"
            return private_symbols.is_worker_failure(error(None, None, words))

        handle = "Unable to find the relevant tensor remote_handle"
        self.assertTrue(fails(tf.errors.UnavailableError, "reset by peer"))
        self.assertTrue(fails(tf.errors.InvalidArgumentError, handle))
        self.assertFalse(fails(tf.errors.InvalidArgumentError, "shapes"))
        self.assertFalse(
            private_symbols.is_worker_failure(
                tf.errors.UnavailableError(None, None, "/job:ps")
            )
        )


if __name__ == "__main__":
    tf.test.main()
