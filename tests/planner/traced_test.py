import functools

import keras
from absl.testing import absltest

from examples import gpt
from tfscale.pipeline.stages.memory import stage_memory
from tfscale.pipeline.stages.plan import make_plan
from tfscale.planner.cost import Predictor
from tfscale.planner.cost import Settings
from tfscale.planner.device import DEVICES
from tfscale.planner.layers import LARGE_WEIGHT
from tfscale.planner.traced import trace_table
from tfscale.schedules.named_schedules import one_f_one_b

LAYERS, WIDTH, LENGTH = 2, 64, 32


def _gpt():
    return gpt.build_gpt(LAYERS, WIDTH, 4, LENGTH, 0.0)


@functools.cache
def _table():
    """Of one rank and of two."""
    return trace_table(_gpt, (1, 2))


class Whole(keras.Model):
    """A model whose order of layers only its `call` knows."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(8)

    def call(self, x):
        return self.dense(x)


def _whole():
    model = Whole()
    model(keras.Input((16,)))
    return model


class TraceTableTest(absltest.TestCase):
    def test_no_variable_gets_a_value(self):
        models = []

        def build_model():
            models.append(_gpt())
            return models[0]

        trace_table(build_model, (1, 2))
        # Nor does the next scope of this thread make them.
        with keras.StatelessScope():
            pass
        for variable in models[0].variables:
            self.assertIsNone(variable._value)

    def test_flops_are_those_of_the_formula(self):
        table = _table()
        products = LAYERS * (24 * WIDTH**2 + 4 * LENGTH * WIDTH)
        products += 2 * WIDTH * gpt.VOCABULARY
        self.assertAlmostEqual(table.flops / (LENGTH * products), 1, delta=0.05)
        self.assertEqual(table.tokens, LENGTH)
        self.assertEqual(table.num_weights, _gpt().count_params())

    def test_memory_is_that_of_stage_memory(self):
        rows, m = 4, 8
        pipeline = make_plan(_gpt(), one_f_one_b(2, m), "flops")
        stages = stage_memory(pipeline, rows)
        predictor = Predictor(
            _table(),
            rows * m,
            DEVICES["H100"],
            cuts=lambda *_: (len(pipeline.stages[0].calls),),
        )
        found = predictor.predict(Settings(pipeline=2, num_microbatches=m))
        fullest = max(stages, key=lambda stage: stage.total)
        self.assertAlmostEqual(found.num_bytes / fullest.total, 1, delta=0.1)
        self.assertEqual(found.memory["weights"], fullest.weights)
        self.assertAlmostEqual(
            found.memory["working"] / fullest.working, 1, delta=0.1
        )

    def test_ranks_divide_blocks_and_sum_four_times(self):
        table = _table()
        one, two = table.by_ranks[1], table.by_ranks[2]
        half = sum(layer.forward.flops for layer in two) / table.flops
        self.assertAlmostEqual(half, 0.5, delta=0.02)
        activations = 4 * LENGTH * WIDTH
        for layer in two:
            if layer.name.endswith(("attention", "mlp_down")):
                self.assertEqual(layer.forward.summed, activations)
                self.assertEqual(layer.forward.sums, 1)
            if layer.name.endswith(("attention", "mlp_up")):
                self.assertEqual(layer.backward.summed, activations)
                self.assertEqual(layer.backward.sums, 1)
        self.assertFalse(any(layer.forward.summed for layer in one))
        self.assertLess(
            sum(layer.kept for layer in two), sum(layer.kept for layer in one)
        )

    def test_large_weights_are_told_from_others(self):
        def build_model():
            inputs = keras.Input((8,), dtype="int32")
            x = keras.layers.Embedding(LARGE_WEIGHT // 4, 4)(inputs)
            return keras.Model(inputs, keras.layers.Dense(4)(x))

        *_, table, dense = trace_table(build_model, [1]).by_ranks[1]
        self.assertEqual(table.large, LARGE_WEIGHT)
        self.assertEqual((dense.trainable, dense.large), (20, 0))

    def test_the_loss_moves_logits(self):
        # It was left out: a tenth of a step of two tables.
        first, *_, last = _table().by_ranks[1]
        logits = 4 * LENGTH * gpt.VOCABULARY
        self.assertEqual(last.backward.moved - last.forward.moved, 3 * logits)
        self.assertLessEqual(first.backward.moved, first.forward.moved)

    def test_dropout_draws_numbers(self):
        # A tenth of a step of BERT on a CPU, which was left out.
        def build_model(rate):
            return gpt.build_gpt(LAYERS, WIDTH, 4, LENGTH, rate)

        def drawn(rate):
            table = trace_table(lambda: build_model(rate), [1, 2])
            return [
                sum(layer.forward.drawn for layer in table.by_ranks[ranks])
                for ranks in (1, 2)
            ]

        self.assertEqual(drawn(0.0), [0, 0])
        one, two = drawn(0.1)
        # Of scores with 4 heads, and of what a block adds.
        self.assertGreaterEqual(one, LAYERS * 2 * LENGTH * WIDTH)
        self.assertEqual(one % (LENGTH * WIDTH), 0)
        self.assertBetween(two, one / 2, one)

    def test_what_is_frozen_has_no_backward(self):
        def build_model():
            model = _gpt()
            for layer in model.layers[:-1]:
                layer.trainable = False
            return model

        *frozen, head = trace_table(build_model, (1,)).by_ranks[1]
        self.assertFalse(any(layer.backward.flops for layer in frozen))
        self.assertFalse(any(layer.trainable for layer in frozen))
        self.assertGreater(head.backward.flops, 0)

    def test_a_call_of_its_own_is_one_layer_and_said(self):
        table = trace_table(_whole, (1, 2))
        self.assertFalse(table.can_be_cut)
        self.assertLen(table.by_ranks[1], 1)
        self.assertEqual(list(table.by_ranks), [1])
        self.assertIn("Planned without stages", table.notes[0])
        self.assertIn("Planned without model ranks", table.notes[1])

    def test_a_call_of_its_own_may_take_several_inputs(self):
        # A dict was refused, of a list came an error of `keras.Input`.
        class Joined(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(5)

            def call(self, inputs):
                joined = keras.ops.concatenate(keras.tree.flatten(inputs), -1)
                return self.dense(joined)

        def build_model(inputs):
            model = Joined()
            model(inputs)
            return model

        first, second = keras.Input((4,)), keras.Input((3,))
        for inputs in ([first, second], {"a": first, "b": second}):
            table = trace_table(lambda i=inputs: build_model(i), (1,))
            self.assertEqual(table.flops, 2 * 7 * 5 + 5)
            self.assertEqual(table.num_weights, 7 * 5 + 5)

    def test_half_precision_is_seen(self):
        keras.config.set_dtype_policy("mixed_bfloat16")
        self.assertTrue(trace_table(_gpt, (1,)).is_half)

    def test_a_model_in_place_of_a_function_is_refused(self):
        with self.assertRaisesRegex(TypeError, "must be a function"):
            trace_table(_gpt(), (1,))

    def test_what_is_no_model_is_refused(self):
        with self.assertRaisesRegex(TypeError, "must return a `keras.Model`"):
            trace_table(lambda: 3, (1,))

    def test_a_model_that_is_not_built_is_refused(self):
        with self.assertRaisesRegex(ValueError, "a built model"):
            trace_table(Whole, (1,))

    def test_a_function_that_compiles_is_refused(self):
        def build_model():
            model = _gpt()
            model.compile("adam", "mse")
            return model

        with self.assertRaisesRegex(ValueError, "Call `compile` after"):
            trace_table(build_model, (1,))


if __name__ == "__main__":
    absltest.main()
