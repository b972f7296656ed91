"""Measured calls cost what they do; a measured step leaves no trace."""

import itertools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tfscale.pipeline.running import measure
from tfscale.pipeline.stages.graph import flatten_model
from tfscale.pipeline.stages.trace_costs import trace_costs
from tfscale.schedules.action import dependencies


def _strategy(data, pipeline):
    return tfscale.MeshStrategy(
        tfscale.device_mesh(data=data, pipeline=pipeline)
    )


def _mlp():
    """Small layers and a large one in the middle, all in one chain."""
    x = inputs = keras.Input((16,), name="inputs")
    x = keras.layers.Dense(16, name="small_0")(x)
    x = keras.layers.Dense(16, name="small_1")(x)
    x = keras.layers.Dense(1024, name="wide")(x)
    x = keras.layers.Dense(1024, name="large")(x)
    x = keras.layers.Dense(4, name="narrow")(x)
    return keras.Model(inputs, x)


def _model_with_state(depth=2):
    x = inputs = keras.Input((6,))
    for index in range(depth):
        x = keras.layers.Dense(8, name=f"dense_{index}")(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.Dropout(0.5)(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


class MeasureCallsTest(tf.test.TestCase, parameterized.TestCase):
    def test_more_work_takes_more_time_and_equal_calls_the_same(self):
        graph = flatten_model(_mlp())
        seconds = dict(
            zip(
                (call.name for call in graph.calls),
                measure.measure_calls(graph, "/CPU:1", rows=256),
            )
        )
        # 1024 x 1024 x 256 multiply-adds, against 16 x 16 x 256: of F, of the
        # whole backward, and of W.
        for large, small, wide in zip(
            seconds["large"], seconds["small_1"], seconds["wide"], strict=True
        ):
            self.assertGreater(large, 10 * small)
            self.assertGreater(large, wide)
            self.assertGreater(small, 0)
        # B takes about as long as W: half of both, here by a factor of ten.
        _, backward, weight = seconds["large"]
        self.assertBetween(weight / backward, 0.05, 1.0)

    def test_equal_calls_share_one_measurement(self):
        inputs = keras.Input((8,))
        x = keras.layers.Dense(8)(inputs)
        for _ in range(3):
            x = keras.layers.Dense(8)(x)
        seconds = measure.measure_calls(
            flatten_model(keras.Model(inputs, x)), "/CPU:0"
        )
        # The first one has no gradient by its input, which is less work.
        self.assertLen(set(seconds), 2)
        self.assertLen(set(seconds[1:]), 1)

    def test_any_layer_can_be_measured(self):
        tokens = keras.Input((None,), dtype="int32")
        x = keras.layers.Embedding(7, 8, mask_zero=True)(tokens)
        x = keras.layers.MultiHeadAttention(2, 4)(x, x)
        x = keras.layers.Dropout(0.1)(x)
        x = keras.layers.LSTM(8)(x)
        frozen = keras.layers.Dense(8, trainable=False)
        x = keras.layers.BatchNormalization()(frozen(x))
        positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=-1)
        model = keras.Model(tokens, [x, positions])
        before = [np.array(v) for v in model.variables]
        graph = trace_costs(flatten_model(model))
        seconds = measure.measure_calls(graph, "/CPU:0", rows=2)
        self.assertLen(seconds, len(graph.calls))
        for (forward, backward, weight), call in zip(seconds, graph.calls):
            self.assertGreater(forward, 0)
            trains = any(v.trainable for v in call.variables)
            self.assertEqual(weight > 0, trains, call.name)
            self.assertGreaterEqual(backward, weight)
        for old, variable in zip(before, model.variables):
            self.assertAllEqual(old, np.array(variable))

    def test_calls_are_measured_where_a_strategy_keeps_their_variables(self):
        strategy = _strategy(data=2, pipeline=2)
        with strategy.scope():
            graph = flatten_model(_model_with_state())
            seconds = measure.measure_calls(
                graph, strategy.device_rows[0][0], rows=2
            )
        self.assertLen(seconds, len(graph.calls))


class MeasureStepTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (1, 1, 2, False), (1, 2, 4, True), (2, 3, 4, False)
    )
    @pytest.mark.crossing(every=3)
    def test_spans_keep_the_order_of_the_schedule(
        self, data, stages, number, works_ahead
    ):
        self.enter_context(
            mock.patch.object(
                measure, "are_accelerators", lambda _: works_ahead
            )
        )
        with _strategy(data, stages).scope():
            model = tfscale.PipelineModel(_model_with_state(), number)
            model.compile("sgd", "mse")
        spans = model.timelines(np.ones((8, 6)), np.ones((8, 1)))["measured"]
        schedule = model._plan.schedule
        by_action = {span.action: span for span in spans}
        self.assertCountEqual(by_action, schedule.order())
        self.assertEqual(min(span.start for span in spans), 0)
        for span in spans:
            self.assertEqual(
                span.device, schedule.stage_devices[span.action.stage]
            )
            self.assertGreater(span.end, span.start)
            for needed in dependencies(span.action, stages):
                self.assertGreaterEqual(span.start, by_action[needed].end)
        # A device does one thing at a time.
        for actions in schedule.actions:
            for one, next_one in itertools.pairwise(actions):
                self.assertGreaterEqual(
                    by_action[next_one].start, by_action[one].end
                )

    def test_stages_are_not_made_to_take_turns_by_measuring(self):
        # TensorFlow runs stateful operations in the order in which they were
        # traced; reading the clock with one ran one stage after the other.
        with _strategy(1, 2).scope():
            x = inputs = keras.Input((512,))
            for _ in range(4):
                x = keras.layers.Dense(512)(x)
            model = tfscale.PipelineModel(keras.Model(inputs, x), 8)
            model.compile("sgd", "mse")
        x = np.ones((1024, 512), "f")
        spans = model.timelines(x, x)["measured"]
        zero, one = (
            [span for span in spans if span.device == d] for d in (0, 1)
        )
        overlap = sum(
            max(0, min(a.end, b.end) - max(a.start, b.start))
            for a in zero
            for b in one
        )
        busy = sum(span.end - span.start for span in zero)
        self.assertGreater(overlap, 0.2 * busy)

    def test_lists_are_several_inputs_and_outputs(self):
        # They became one tensor: "input has incompatible shape (2, 8, 6)".
        with _strategy(1, 2).scope():
            inputs = [keras.Input((6,)), keras.Input((6,))]
            x = keras.layers.Dense(6)(inputs[0] + inputs[1])
            model = keras.Model(inputs, [x, keras.layers.Dense(6)(x)])
            model = tfscale.PipelineModel(model, 2)
            model.compile("sgd", ["mse", "mse"])
        x = np.ones((8, 6), "f")
        spans = model.timelines([x, x], [x, x])
        self.assertLen(spans["measured"], 8)

    def test_a_custom_loss_gets_the_inputs_too(self):
        class WithLoss(tfscale.PipelineModel):
            def compute_loss(self, x, y, y_pred, *args, **kwargs):
                error = keras.ops.mean((y_pred - y) ** 2)
                return error + keras.ops.mean(x) + sum(self.losses)

        with _strategy(1, 2).scope():
            model = WithLoss(_model_with_state(), 2)
            model.compile("sgd")
        spans = model.timelines(np.ones((8, 6), "f"), np.ones((8, 1), "f"))
        self.assertLen(spans["measured"], 8)

    @parameterized.parameters(1, 2)
    @pytest.mark.crossing(every=2)
    def test_nothing_changes(self, num_replicas):
        with _strategy(num_replicas, 2).scope():
            model = tfscale.PipelineModel(_model_with_state(depth=1), 2)
            optimizer = keras.optimizers.SGD(momentum=0.9)
            model.compile(optimizer, "mse", metrics=["mae"])
        x, y = np.ones((8, 6), "f"), np.ones((8, 1), "f")
        model.fit(x, y, verbose=0)

        def state():
            return [
                np.array(variable)
                for variable in (
                    *model.variables,
                    *model.metrics_variables,
                    *model.optimizer.variables,
                )
            ]

        before = state()
        model.timelines(x, y)
        for old, new in zip(before, state(), strict=True):
            self.assertAllEqual(old, new)


class TimelinesTest(tf.test.TestCase):
    def test_prediction_has_as_much_work_as_the_measured_step(self):
        with _strategy(1, 2).scope():
            model = tfscale.PipelineModel(_model_with_state(), 2)
        plan = model._plan
        predicted = measure.timelines(plan)["predicted"]
        self.assertEqual(predicted, list(plan.simulation.spans))
        measured = [
            span._replace(start=3 * span.start, end=3 * span.end)
            for span in predicted
        ]
        both = measure.timelines(plan, measured)
        self.assertEqual(list(both), ["predicted", "measured"])
        self.assertAllClose(
            [[s.start, s.end] for s in both["predicted"]],
            [[s.start, s.end] for s in both["measured"]],
        )


if __name__ == "__main__":
    tf.test.main()
