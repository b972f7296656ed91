"""Bytes that stages keep: closed forms, and estimates against what is."""

import collections
import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from examples import gpt
from tfscale.pipeline.stages import memory
from tfscale.pipeline.stages.memory import stage_memory

ROWS = 4
ONE = ROWS * 64 * 4  # bytes of a tensor of 64 float32 numbers per example


def _mlp():
    # Inputs, outputs of both ReLUs, and the mask of the dropout (bool), which
    # multiplies by a number that is not kept.
    x = inputs = keras.Input((64,))
    x = keras.layers.Dense(64, activation="relu")(x)
    x = keras.layers.Dropout(0.5)(x)
    x = keras.layers.Dense(64, activation="relu")(x)
    x = keras.layers.Reshape((8, 8))(x)
    x = keras.layers.Flatten()(x)
    return keras.Model(inputs, keras.layers.Dense(64)(x))


def _cnn():
    x = inputs = keras.Input((16, 16, 3))
    for filters in (4, 8):
        x = keras.layers.Conv2D(filters, 3, padding="same")(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.MaxPooling2D()(keras.layers.ReLU()(x))
    x = keras.layers.Dense(10)(keras.layers.Flatten()(x))
    return keras.Model(inputs, x)


def _gpt():
    return gpt.build_gpt(2, 16, 2, 8, dropout=0.1)


def _wrapped(build, num_stages, **kwargs):
    """A pipeline model of two microbatches."""
    mesh = tfscale.device_mesh(pipeline=num_stages)
    with tfscale.MeshStrategy(mesh).scope():
        model = tfscale.PipelineModel(build(), 2, **kwargs)
        model.compile("sgd", "mse")
    return model


@functools.cache
def _fitted(build, num_stages, rows=2 * ROWS, **kwargs):
    """One that was trained on a batch."""
    model = _wrapped(build, num_stages, **kwargs)
    (given,), (made,) = model.model.inputs, model.model.outputs
    model.fit(
        np.ones((rows, *given.shape[1:]), given.dtype),
        np.ones((rows, *made.shape[1:]), made.dtype),
        batch_size=rows,
        verbose=0,
    )
    return model


def _exact(model):
    (program,) = model.programs
    kept = (memory.saved_buffers(each.phases) for each in program.stages)
    return [sum(of_stage.values()) for of_stage in kept]


class ActivationBytesTest(tf.test.TestCase, parameterized.TestCase):
    def test_every_buffer_counts_once(self):
        # The input, two ReLUs, the dropped-out tensor, its mask of one byte a
        # number, and what the loss keeps: the difference to the targets.
        # Reshape and Flatten only give the second ReLU new names.
        self.assertEqual(
            _exact(_fitted(_mlp, 1)), [ONE + 2 * ONE + ONE + ONE // 4 + ONE]
        )

    @parameterized.parameters(False, True)
    @pytest.mark.crossing(every=2)
    def test_recomputing_stages_keep_their_inputs(self, recompute):
        (zero, one) = _exact(
            _fitted(_mlp, 2, recompute=True) if recompute else _fitted(_mlp, 2)
        )
        if recompute:
            self.assertEqual((zero, one), (ONE, ONE))
        else:
            self.assertGreater(min(zero, one), ONE)

    # In the GPT Grappler finds that two lookups keep the same numbers.
    @parameterized.parameters((_mlp, 0), (_cnn, 0), (_gpt, 0.002))
    @pytest.mark.crossing(every=3)
    def test_estimate_is_what_a_stage_keeps(self, build, rtol):
        model = _fitted(build, 2)
        estimated = stage_memory(model._plan, ROWS)
        self.assertAllClose(
            _exact(model), [s.activations for s in estimated], rtol, atol=0
        )

    @parameterized.parameters(False, True)
    @pytest.mark.crossing(every=2)
    def test_gradients_of_the_largest_call_live_beside(self, recompute):
        # A tensor, its mask, and no weights; a tensor and 64 x 64 + 64 numbers.
        dropout, dense = ONE + ONE // 4, ONE + 4 * (64 * 64 + 64)
        plan = _wrapped(_mlp, 2, balance=["dropout"], recompute=recompute).plan
        update = 3 * 4 * 64 * 64  # of a kernel, when no activations are there
        for rows, most in ((ROWS, "update"), (32 * ROWS, "backward")):
            for stage in stage_memory(plan, rows):
                if rows == ROWS:
                    self.assertEqual(stage.working, dense)
                held = stage.in_flight * stage.activations + stage.recomputed
                backward = held + stage.working
                self.assertEqual(update > backward, most == "update")
                self.assertEqual(
                    stage.total,
                    stage.weights
                    + stage.gradients
                    + stage.slots
                    + max(update, backward),
                )
        calls, graph = plan.graph.calls, plan.graph
        self.assertEqual(
            [
                memory.working_bytes(graph, call, kept, ROWS)
                for call, kept in zip(calls, memory.call_memory(graph, ROWS))
            ],
            [dense, dropout, dense, ONE, ONE, dense],
        )

    def test_sizes_that_nobody_knows_are_refused(self):
        model = _fitted(_mlp, 1, rows=3)
        with self.assertRaisesRegex(ValueError, "num_microbatches divides"):
            _exact(model)


class TrainingBytesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(("float32", 4, 4), ("bfloat16", 2, 4))
    def test_gradients_are_summed_in_float32(self, dtype, size, sum_size):
        layer = keras.layers.Dense(3, dtype=dtype)
        layer.build((None, 5))
        frozen = keras.layers.Dense(7, dtype=dtype, trainable=False)
        frozen.build((None, 1))
        self.assertEqual(
            memory.training_bytes(
                [*layer.variables, *frozen.variables], num_slots=1
            ),
            ((18 + 14) * size, 18 * sum_size, 18 * size),
        )


class DividedVariablesTest(tf.test.TestCase, parameterized.TestCase):
    """Stages of which ranks have shards, and replicas parts of slots."""

    def _model(self, data, ranks, zero_stage, **kwargs):
        mesh = tfscale.device_mesh(data=data, pipeline=2, model=ranks)
        layout_map = keras.distribution.LayoutMap(mesh)
        if ranks > 1:
            layout_map[".*up.*/kernel"] = (None, "model")
            layout_map[".*up.*/bias"] = ("model",)
            layout_map[".*down.*/kernel"] = ("model", None)
        strategy = tfscale.MeshStrategy(mesh, layout_map, zero_stage=zero_stage)
        with strategy.scope():
            # Two replicas divide biases of 26, and not those of 13 and 7.
            x = inputs = keras.Input((7,))
            for n in range(2):
                x = keras.layers.Dense(26, "relu", name=f"up_{n}")(x)
                x = keras.layers.Dense(7, name=f"down_{n}")(x)
                x = keras.layers.BatchNormalization(name=f"norm_{n}")(x)
            model = tfscale.PipelineModel(
                keras.Model(inputs, x), 2, balance=["up_1"], **kwargs
            )
            model.compile("adam", "mse")
        return model

    @parameterized.parameters((2, 1, 0), (2, 1, 1), (1, 2, 0), (2, 2, 1))
    @pytest.mark.crossing(every=4)
    def test_bytes_are_those_on_each_device(self, data, ranks, zero_stage):
        model = self._model(data, ranks, zero_stage)
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
        found = []
        for variables in (
            model.plan.variables,
            [v for v in model.optimizer.variables if v.shape.rank],
        ):
            found.append(collections.Counter())
            for variable in variables:
                for component in variable.value.values:
                    size = component.dtype.size * component.shape.num_elements()
                    found[-1][component.device] += size
        weights, slots = found
        estimated = stage_memory(model.plan, ROWS)
        for stages in model.distribute_strategy.device_grid:
            for stage, devices in zip(estimated, stages, strict=True):
                for device in devices:
                    self.assertEqual(stage.weights, weights[device])
                    self.assertEqual(stage.slots, slots[device])

    def test_gradients_are_of_shards_and_of_all_replicas(self):
        (whole, _) = stage_memory(self._model(2, 1, 1).plan, ROWS)
        (shards, _) = stage_memory(self._model(2, 2, 1).plan, ROWS)
        numbers = 7 * 26 + 26 + 26 * 7 + 7 + 2 * 7
        self.assertEqual(whole.gradients, 4 * numbers)
        self.assertEqual(
            shards.gradients, 4 * (7 * 13 + 13 + 13 * 7 + 7 + 2 * 7)
        )

    @parameterized.parameters((2, 1, 1), (1, 2, 0))
    @pytest.mark.crossing
    def test_a_limit_may_be_lower_by_what_others_have(self, *mesh):
        least, needed = [], []
        for sizes in ((mesh[0], 1, 0), mesh):
            stages = stage_memory(self._model(*sizes).plan, 1)
            needed.append(max(stage.total for stage in stages))
            with self.assertRaisesRegex(ValueError, "memory limit") as error:
                self._model(*sizes, memory_limit=1)
            (found,) = re.findall(r"least needs ([\d,]+)", str(error.exception))
            least.append(int(found.replace(",", "")))
            self._model(*sizes, memory_limit=least[-1])
        self.assertGreater(least[0], least[1])
        self.assertEqual(least[0] - least[1], needed[0] - needed[1])

    @parameterized.parameters((1, ""), (2, ", undivided"))
    @pytest.mark.crossing(every=2)
    def test_a_summary_tells_that_activations_count_whole(self, ranks, end):
        texts = []
        self._model(1, ranks, 0).pipeline_summary(print_fn=texts.append)
        self.assertIn(f"one of 1 row{end}\n", texts[0] + "\n")


if __name__ == "__main__":
    tf.test.main()
