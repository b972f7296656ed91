"""Where everything is: variables, slots, and the operations that really ran.

The mesh of these tests leaves the first device out. It is the host, as
accelerators have one beside them.
"""

import collections
import contextlib
import gc
import re
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import executed_functions
from tfscale.pipeline import PipelineModel
from tfscale.schedules.looped_schedules import interleaved

HOST = "CPU:0"
NUM_MICROBATCHES = 4


def build():
    """Three dense layers with 80, 99 and 40 weights."""
    x = inputs = keras.Input((7,), name="x")
    for name, units in (("a", 10), ("b", 9), ("c", 4)):
        x = keras.layers.Dense(units, "tanh", name=name)(x)
    return keras.Model(inputs, x)


def mesh_strategy(num_stages, num_replicas):
    """Replica r has the devices 1 + r S, ..., (r + 1) S."""
    mesh = tfscale.device_mesh(
        data=num_replicas,
        pipeline=num_stages,
        devices=[f"CPU:{1 + i}" for i in range(num_stages * num_replicas)],
    )
    return tfscale.MeshStrategy(mesh)


def train(strategy, cuts, optimizer=keras.optimizers.Adam, **options):
    with strategy.scope():
        model = build()
        pipeline = PipelineModel(
            model, NUM_MICROBATCHES, balance=cuts, **options
        )
        pipeline.compile(optimizer(), "mse")
    random = np.random.RandomState(0)
    x, y = random.rand(16, 7), random.rand(16, 4)
    pipeline.fit(x, y, batch_size=16, verbose=0)
    return model, pipeline


def short(device):
    return device.split("device:")[-1]


def stages_of(partition):
    """The stages that the operations of one device belong to, by name.

    TensorFlow names what receives a tensor after the tensor.
    """
    found = (
        re.search("/stage_([0-9]+)/", node.name)
        for node in partition.node
        if node.op != "_Recv"
    )
    return {int(match[1]) for match in found if match}


def products(partition):
    """How many matrices one device multiplies."""
    return sum(node.op.endswith("MatMul") for node in partition.node)


class PlacementTest(parameterized.TestCase):
    @parameterized.parameters(("gpipe", False), ("1f1b", False), ("1f1b", True))
    @pytest.mark.crossing(every=3)
    def test_executed_operations_are_on_the_device_of_their_stage(
        self, schedule, recompute
    ):
        strategy = mesh_strategy(3, 2)
        with executed_functions.executed_functions() as found:
            train(strategy, ["b", "c"], schedule=schedule, recompute=recompute)
        # The largest: the step. One graph per device and one of the host.
        step = executed_functions.largest(found)
        partitions = {short(graph.node[0].device): graph for graph in step}
        self.assertCountEqual(partitions, [f"CPU:{i}" for i in range(7)])
        for device, graph in partitions.items():
            self.assertEqual(
                {short(node.device) for node in graph.node}, {device}
            )
            operations = {node.op for node in graph.node}
            # Nothing is left in functions, where it would not be seen.
            self.assertFalse([op for op in operations if "Call" in op])
            # Adam runs where its slots are.
            self.assertEqual("Sqrt" in operations, device != HOST)
            updated = [n.op == "AssignSubVariableOp" for n in graph.node]
            self.assertEqual(sum(updated), 2 if device != HOST else 0)
            stage = (int(device[-1]) - 1) % 3
            self.assertEqual(
                stages_of(graph), set() if device == HOST else {stage}
            )
            # Forward, gradients by weights and, unless it is data, by input.
            by_microbatch = 2 + (stage > 0) + recompute
            self.assertEqual(
                products(graph),
                0 if device == HOST else NUM_MICROBATCHES * by_microbatch,
            )

    @parameterized.parameters("1f1b", "pipedream")
    @pytest.mark.crossing(every=2)
    def test_devices_pass_nothing_on(self, schedule):
        # New weights went from their stage to the first one, and back for the
        # next batch.
        strategy = mesh_strategy(3, 1)
        with strategy.scope():
            pipeline = PipelineModel(build(), 1, schedule, ["b", "c"])
            optimizer = keras.optimizers.SGD(momentum=0.9)
            pipeline.compile(optimizer, "mse", steps_per_execution=4)
        with executed_functions.executed_functions() as found:
            pipeline.fit(
                np.ones((32, 7)), np.ones((32, 4)), batch_size=8, verbose=0
            )
        step = max(found, key=lambda graphs: sum(len(g.node) for g in graphs))
        received, results = {}, set()
        for node in (node for graph in step for node in graph.node):
            if node.op == "_Recv":
                received[node.attr["tensor_name"].s] = node.name
            elif node.op == "_Retval":
                results.add(node.input[0])
        for graph in step:
            nodes = {node.name: node for node in graph.node}
            for sent in graph.node:
                name = sent.attr["tensor_name"].s
                if sent.op == "_Send" and received.get(name) not in results:
                    made = nodes[sent.input[0].split(":")[0]]
                    while made.op == "Identity":
                        made = nodes[made.input[0].split(":")[0]]
                    self.assertNotEqual(made.op, "_Recv", sent.name)

    @parameterized.parameters(1, 2)
    @pytest.mark.crossing(every=2)
    def test_gradients_stay_on_the_device_of_their_variable(self, replicas):
        # All of them had gone through one operation of one stage, twice
        # with two replicas, and Adam's slots had been sent to it and back.
        found = set()

        class Recording(keras.optimizers.SGD):
            def update_step(self, gradient, variable, learning_rate):
                found.add((gradient.device, variable.device))
                super().update_step(gradient, variable, learning_rate)

        strategy = mesh_strategy(3, replicas)
        train(strategy, ["b", "c"], lambda: Recording(global_clipnorm=1.0))
        # It traces the update, which others make on devices of their own.
        devices = strategy.device_rows[0]
        self.assertEqual(found, {(device, device) for device in devices})

    @pytest.mark.crossing
    def test_interleaved_stages_share_their_device(self):
        strategy = mesh_strategy(2, 1)
        schedule = interleaved(2, NUM_MICROBATCHES, 2)
        with strategy.scope():
            x = inputs = keras.Input((7,))
            for name in "abcd":
                x = keras.layers.Dense(7, name=name)(x)
            model = keras.Model(inputs, x)
            pipeline = PipelineModel(
                model, NUM_MICROBATCHES, schedule, ["b", "c", "d"]
            )
            pipeline.compile(keras.optimizers.SGD(momentum=0.9), "mse")
        with executed_functions.executed_functions() as found:
            pipeline.fit(np.ones((8, 7)), np.ones((8, 7)), verbose=0)
        step = executed_functions.largest(found)
        for graph in step:
            device = short(graph.node[0].device)
            self.assertEqual(
                stages_of(graph),
                {HOST: set(), "CPU:1": {0, 2}, "CPU:2": {1, 3}}[device],
            )
        for layer, device in zip("abcd", ["CPU:1", "CPU:2"] * 2):
            for variable in model.get_layer(layer).variables:
                self.assertEqual(short(variable.value.device), device)

    @parameterized.parameters((1, 1), (2, 1), (3, 1), (1, 2), (3, 2))
    @pytest.mark.crossing(every=5)
    def test_variables_and_slots_are_on_their_stage_of_every_replica(
        self, num_stages, num_replicas
    ):
        strategy = mesh_strategy(num_stages, num_replicas)
        cuts = ["b", "c"][: num_stages - 1]
        model, pipeline = train(strategy, cuts)
        stages = dict.fromkeys("abc", 0)
        for stage, first in enumerate(cuts):
            for layer in "abc"["abc".index(first) :]:
                stages[layer] = stage + 1
        slots = {slot.path: slot for slot in pipeline.optimizer.variables}
        for layer, stage in stages.items():
            for variable in model.get_layer(layer).variables:
                path = variable.path.replace("/", "_")
                for each in (
                    variable,
                    slots[f"adam/{path}_momentum"],
                    slots[f"adam/{path}_velocity"],
                ):
                    components = strategy.experimental_local_results(each.value)
                    self.assertEqual(
                        [short(c.device) for c in components],
                        [
                            f"CPU:{1 + r * num_stages + stage}"
                            for r in range(num_replicas)
                        ],
                    )
                    for component in components:
                        self.assertEqual(component.shape, variable.shape)
                    for component in components[1:]:
                        np.testing.assert_array_equal(component, components[0])

    @parameterized.parameters(1, 2)
    @pytest.mark.crossing(every=2)
    def test_no_device_ever_holds_the_whole_model(self, num_replicas):
        # All weights and slots that are alive, after each that is made.
        alive = collections.Counter()
        most = collections.Counter()

        def record(next_creator, **kwargs):
            variable = next_creator(**kwargs)
            device = short(variable.device)
            size = int(np.prod(variable.shape))

            def freed():
                alive[device] -= size

            weakref.finalize(variable.handle, freed)
            alive[device] += size
            most[device] = max(most[device], alive[device])
            return variable

        strategy = mesh_strategy(3, num_replicas)
        # Outside the strategy: called for each component.
        with tf.variable_creator_scope(record):
            model, _ = train(strategy, ["b", "c"])
        self.assertEqual(model.count_params(), 80 + 99 + 40)
        for replica in range(num_replicas):
            for stage, weights in enumerate((80, 99, 40)):
                # The weights and the two slots of Adam.
                device = f"CPU:{1 + 3 * replica + stage}"
                self.assertEqual(most[device], 3 * weights)
        # Where the model was built, a copy for each replica.
        self.assertGreaterEqual(most[HOST], num_replicas * (80 + 99 + 40))

    def test_variables_have_the_names_of_one_device(self):
        # "kernel:0" it was. `exclude_from_weight_decay(var_names=["a/"])` left
        # out nothing.
        expected = [variable.value.name for variable in build().variables]
        with mesh_strategy(2, 2).scope():
            model = build()
            PipelineModel(model, NUM_MICROBATCHES)
        found = [variable.value.name for variable in model.variables]
        self.assertEqual(found, expected)
        self.assertStartsWith(found[0], "a/kernel")

    def test_variables_that_an_optimizer_excluded_before_are_excluded(self):
        # Optimizers know variables by numbers, which were new ones.
        with mesh_strategy(2, 2).scope():
            model = build()
            optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
            kernels = [model.get_layer(name).kernel for name in ("a", "b")]
            optimizer.exclude_from_weight_decay(var_list=kernels[:1])
            pipeline = PipelineModel(model, NUM_MICROBATCHES, balance=["b"])
            pipeline.compile(optimizer, "mse")
        before = [kernel.numpy() for kernel in kernels]
        x = np.zeros((16, 7))
        # No gradient of the kernels: they change by their decay alone.
        pipeline.train_on_batch(x, np.ones((16, 4)))
        np.testing.assert_array_equal(kernels[0].numpy(), before[0])
        self.assertFalse(np.array_equal(kernels[1].numpy(), before[1]))

    @pytest.mark.crossing
    def test_models_that_share_weights_follow_them(self):
        # What had been traced went on with the copies from before, and trained
        # these: an encoder predicted as at the beginning.
        x = np.random.RandomState(0).normal(size=(16, 7))

        def train(strategy=None):
            keras.utils.set_random_seed(1)
            with strategy.scope() if strategy else contextlib.nullcontext():
                inputs = keras.Input((7,))
                h = keras.layers.Dense(8, "tanh", name="a")(inputs)
                h = keras.layers.Dense(8, "tanh", name="b")(h)
                models = []
                for name, layers in (("c", 1), ("d", 4)):
                    y = h
                    for i in range(layers):
                        y = keras.layers.Dense(7, name=f"{name}{i}")(y)
                    models.append(keras.Model(inputs, y))
                encoder = keras.Model(inputs, h)

            def wrapped(model):
                with strategy.scope() if strategy else contextlib.nullcontext():
                    if strategy:
                        model = PipelineModel(model, 2, balance="params")
                    model.compile("sgd", "mse")
                return model

            first = wrapped(models[0])
            found = [first.train_on_batch(x, x), encoder.predict(x, verbose=0)]
            found.append(first.test_on_batch(x, x))
            second = wrapped(models[1])
            for model in (second, first, second, first):
                found.append(model.train_on_batch(x, x))
                found.append(encoder.predict(x, verbose=0))
            found.append(first.test_on_batch(x, x))
            found.append(first.predict(x, verbose=0))
            for layer in models[1].layers[:3]:
                layer.trainable = False
            second.make_train_function(force=True)
            found.append(second.train_on_batch(x, x))
            for layer in models[1].layers[:3]:
                layer.trainable = True
            first.make_train_function(force=True)
            found.append(first.train_on_batch(x, x))
            return [*found, encoder.predict(x, verbose=0)]

        found = train(mesh_strategy(2, 1))
        for ours, plain in zip(found, train(), strict=True):
            np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)

    def test_the_copies_on_the_host_are_let_go(self):
        strategy = mesh_strategy(2, 1)
        with strategy.scope():
            model = build()
            handles = [
                weakref.ref(c.handle)
                for v in model.variables
                for c in strategy.experimental_local_results(v.value)
            ]
            PipelineModel(model, 1, balance=["b"])
        gc.collect()
        self.assertLen(handles, 6)
        self.assertEqual([handle() for handle in handles], [None] * 6)
