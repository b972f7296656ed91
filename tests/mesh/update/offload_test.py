"""Slots on the host: where they are, what crosses, and the same numbers.

The meshes leave the first CPU device out. It is the host, as accelerators have
one beside them.
"""

import collections
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.backup import jobs
from tests.executed_functions import executed_functions
from tests.pipeline.running.placement_test import HOST
from tests.pipeline.running.placement_test import short
from tests.tensor_parallel import optimizer_test
from tests.variables import fully_sharded_test
from tests.variables import zero_test

OPTIMIZERS = keras.optimizers
DEVICES = [f"CPU:{i}" for i in range(1, 8)]
X, Y = optimizer_test.DATA["x"][:32], optimizer_test.DATA["y"][:32]


def averaged(ema_overwrite_frequency=2):
    """All that an optimizer may keep, clipped by one norm of all gradients."""
    return OPTIMIZERS.AdamW(
        0.01,
        global_clipnorm=0.1,
        amsgrad=True,
        use_ema=True,
        ema_overwrite_frequency=ema_overwrite_frequency,
    )


def never_written():
    """Whose averages no weight needs during the training."""
    return averaged(None)


MAKE = {
    "averaged": averaged,
    "loss_scale": lambda: optimizer_test.scaled(averaged()),
    "ftrl": lambda: OPTIMIZERS.Ftrl(0.05),
    "scheduled": zero_test.scheduled,
    "lars": lambda: tfscale.optimizers.LARS(0.05),
}
# They need the whole of a variable, or one step for all of them.
MAKE_WHOLE = {
    "muon": lambda: OPTIMIZERS.Muon(0.01),
    "accumulated_by_keras": lambda: OPTIMIZERS.Adam(
        0.01, gradient_accumulation_steps=2
    ),
    "several": lambda: OPTIMIZERS.MultiOptimizer(
        OPTIMIZERS.OptimizerMap(OPTIMIZERS.Adam(0.01))
    ),
}


def train(name, stage, offload, data=2, pipeline=None, model=1, **changes):
    job = same_numbers.Job(
        optimizer_test.mlp,
        dict(x=X, y=Y, batch_size=16),
        optimizer={**MAKE, **MAKE_WHOLE}[name],
        **changes,
    )
    with (
        fully_sharded_test.small_weights_divided(),
        same_numbers.calls_of_each_replica(),
    ):
        return same_numbers.on_zero(
            job,
            data,
            pipeline,
            model,
            optimizer_test.LAYOUTS if model > 1 else None,
            stage,
            DEVICES[: data * (pipeline or 1) * model],
            offload,
        )


def strategy_of(offload="slots", data=2, **options):
    mesh = tfscale.device_mesh(data=data, devices=DEVICES[:data])
    return tfscale.MeshStrategy(mesh, offload=offload, **options)


def built(strategy, make=averaged):
    with strategy.scope():
        model = optimizer_test.mlp()
        model.compile(make(), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def devices_of(variables):
    return {
        short(component.device)
        for variable in variables
        for component in variable.value.values
    }


def sent_by(partition):
    """What a device sends: nodes, each with the rank of the variable it reads.

    The rank is None, if it reads none.
    """
    nodes = {node.name: node for node in partition.node}
    for node in partition.node:
        if node.op not in ("_Send", "_HostSend"):
            continue
        sent = nodes[node.input[0].split(":")[0]]
        rank = None
        if sent.op == "ReadVariableOp":
            handle = sent
            while handle.op != "_Arg":
                handle = nodes[handle.input[0].split(":")[0]]
            shape = handle.attr["_handle_shapes"].list.shape[0]
            rank = len(shape.dim)
        yield sent, rank


class SameNumbersTest(tf.test.TestCase, parameterized.TestCase):
    def check(self, *args, **kwargs):
        expected = train(*args, None, **kwargs)
        actual = train(*args, "slots", **kwargs)
        same_numbers.assert_equal(self, expected, actual)
        model = actual.model
        self.assertEqual(devices_of(model.optimizer.variables), {HOST})
        self.assertNotIn(HOST, devices_of(model.trainable_variables))

    @parameterized.parameters(
        *((name, 0) for name in (*MAKE, *MAKE_WHOLE)),
        *((name, 1) for name in MAKE),
        ("averaged", 3),
        ("loss_scale", 3),
    )
    @pytest.mark.crossing(every=16)
    def test_as_with_slots_on_devices(self, name, stage):
        self.check(name, stage)

    @parameterized.parameters("averaged", "loss_scale")
    @pytest.mark.crossing(every=2)
    def test_of_one_device(self, name):
        self.check(name, 0, data=1)

    @parameterized.parameters(
        ("averaged", 1, 2, None, 2),
        ("averaged", 3, 2, None, 2),
        ("loss_scale", 1, 2, 2, 1),
        ("averaged", 0, 1, 2, 2),
    )
    @pytest.mark.crossing
    def test_with_stages_and_ranks(self, name, stage, data, pipeline, model):
        self.check(name, stage, data=data, pipeline=pipeline, model=model)

    @pytest.mark.crossing
    def test_operation_by_operation(self):
        self.check("averaged", 1, compile=lambda: {"run_eagerly": True})

    @parameterized.parameters(1, 0, 3)
    @pytest.mark.crossing
    def test_in_microbatches(self, stage):
        def callbacks():
            return [tfscale.callbacks.GradientAccumulation(2)]

        expected = train(
            "averaged", stage, None, fit={"callbacks": callbacks()}
        )
        actual = train(
            "averaged", stage, "slots", fit={"callbacks": callbacks()}
        )
        same_numbers.assert_equal(self, expected, actual)

    @parameterized.parameters(1, 0)
    @pytest.mark.crossing
    def test_of_weights_swapped_with_their_averages(self, stage):
        def fit():
            swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
            return dict(epochs=2, validation_data=(X, Y), callbacks=[swap])

        expected = train("loss_scale", stage, None, fit=fit())
        actual = train("loss_scale", stage, "slots", fit=fit())
        same_numbers.assert_equal(self, expected, actual)
        self.assertEqual(expected.logs, actual.logs)


class PlacementTest(tf.test.TestCase, parameterized.TestCase):
    def step(self, make, **options):
        """The graphs of the step that ran, one for each device."""
        model = built(strategy_of(**options), make)
        with executed_functions() as found:
            model.fit(X, Y, batch_size=32, verbose=0)
        step = max(found, key=lambda graphs: sum(len(g.node) for g in graphs))
        return {short(graph.node[0].device): graph for graph in step}

    @parameterized.parameters(
        (1, 0, never_written),
        (2, 0, never_written),
        (2, 1, never_written),
        (2, 3, never_written),
        (2, 1, lambda: optimizer_test.scaled(never_written())),
    )
    @pytest.mark.crossing(every=5)
    def test_updates_run_on_the_host_and_no_slot_leaves_it(
        self, data, stage, make
    ):
        with fully_sharded_test.small_weights_divided():
            step = self.step(make, data=data, zero_stage=stage)
        for device, graph in step.items():
            operations = collections.Counter(node.op for node in graph.node)
            products = sum(node.op.endswith("MatMul") for node in graph.node)
            if device == HOST:
                # Of Adam, for each of 4 variables.
                self.assertEqual(operations["Maximum"], 4 * data)
                self.assertEqual(products, 0)
            else:
                # Of clipping.
                self.assertLessEqual(operations["Maximum"], 1)
                self.assertGreater(products, 0)
        sent = [*sent_by(step[HOST])]
        self.assertEqual([n.name for n, rank in sent if rank], [])
        # The change of each variable.
        changes = [node for node, _ in sent if node.op == "RealDiv"]
        self.assertLen(changes, 4 * data)

    def test_what_has_no_slots_is_updated_on_its_device(self):
        step = self.step(lambda: OPTIMIZERS.SGD(0.1), data=1)
        updates = {
            device: sum("AssignSub" in node.op for node in graph.node)
            for device, graph in step.items()
        }
        self.assertEqual(updates, {HOST: 0, "CPU:1": 4})

    def test_replicas_divide_what_the_host_has(self):
        for stage, shape in ((0, (12, 24)), (1, (6, 24))):
            model = built(strategy_of(zero_stage=stage))
            slot = model.optimizer.variables[2].value
            self.assertEqual({tuple(v.shape) for v in slot.values}, {shape})
            self.assertLen(slot.values, 2)

    @parameterized.parameters(
        (0, 1, "9.57 KB of 9.57 KB"), (1, 2, "4.79 KB of 9.57 KB")
    )
    def test_the_summary_tells_it(self, stage, data, text):
        model = built(strategy_of(zero_stage=stage, data=data))
        lines = []
        tfscale.sharding_summary(model, print_fn=lines.append)
        self.assertIn(f"Optimizer, on the host (CPU:0): {text}", lines[0])

    def test_a_pipeline_needs_no_memory_for_them(self):
        found = []
        for offload in (None, "slots"):
            mesh = tfscale.device_mesh(pipeline=2, devices=DEVICES[:2])
            with tfscale.MeshStrategy(mesh, offload=offload).scope():
                model = tfscale.PipelineModel(optimizer_test.mlp(), 2)
            lines = []
            model.pipeline_summary(print_fn=lines.append)
            found.append(lines[0])
        self.assertNotIn("on the host", found[0])
        self.assertIn("optimizer slots per variable (on the host)", found[1])


class BackupTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("slots", None)
    @pytest.mark.crossing
    def test_what_is_saved_is_loaded_on_the_host_and_elsewhere(self, offload):
        folder = self.create_tempdir().full_path
        source = train("averaged", 1, "slots").model
        saved = os.path.join(folder, "model.keras")
        source.save(saved)
        checkpoint = tf.train.Checkpoint(
            model=source, optimizer=source.optimizer
        ).save(os.path.join(folder, "c"))
        strategy = strategy_of(offload, zero_stage=1)
        with strategy.scope():
            loaded = keras.models.load_model(saved)
        restored = built(strategy)
        tf.train.Checkpoint(
            model=restored, optimizer=restored.optimizer
        ).restore(checkpoint).assert_existing_objects_matched()
        for model in (loaded, restored):
            for expected, found in zip(
                source.variables + source.optimizer.variables,
                model.variables + model.optimizer.variables,
                strict=True,
            ):
                np.testing.assert_array_equal(found, expected)
            self.assertEqual(
                devices_of(model.optimizer.variables) == {HOST},
                offload == "slots",
            )
            model.fit(X, Y, verbose=0)

    @parameterized.parameters(
        ("slots", None), (None, "slots"), ("slots", None, "slots")
    )
    @pytest.mark.crossing
    def test_a_killed_run_goes_on_with_and_without(self, *offloads):
        folder = self.create_tempdir().full_path
        arguments = dict(data="tfscale", model="plain", validate=False)

        def run(name, offload, **kwargs):
            options = {"zero_stage": 1, "offload": offload}
            return jobs.run(
                folder=f"{folder}/{name}",
                mesh={"data": 2},
                options=options,
                **arguments,
                **kwargs,
            )

        whole = run("whole", None)
        *killed, last = offloads
        for batch, offload in enumerate(killed, start=5 - len(killed)):
            with self.assertRaises(jobs.Killed):
                run("runs", offload, kill=f"batch {batch}")
        end = run("runs", last)
        self.assertEqual(end["values"], whole["values"])
        self.assertEqual(end["iterations"], whole["iterations"])


class BadInputTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        True, False, 1, "weights", "activations", "Slots", "", (["slots"],)
    )
    def test_a_value_that_is_not_there(self, offload):
        with self.assertRaisesWithLiteralMatch(
            ValueError,
            "`offload` must be None, or 'slots', which puts optimizer slots "
            f"on the host. Received: offload={offload!r}. Weights and "
            "activations stay on their devices: divide weights by "
            "zero_stage=3 or a 'pipeline' axis, and reduce activations by "
            "GradientAccumulation or recomputation.",
        ):
            strategy_of(offload)

    def test_what_xla_compiles(self):
        strategy = strategy_of(data=1)
        compiled = tf.function(lambda: tf.zeros(()), jit_compile=True)
        with self.assertRaisesRegex(ValueError, "with slots on the host"):
            strategy.run(compiled)


if __name__ == "__main__":
    tf.test.main()
