"""Plans: where a model is cut, where variables live, what is refused."""

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

from examples import gpt
from tfscale.pipeline.running import measure
from tfscale.pipeline.stages.call_costs import parameters
from tfscale.pipeline.stages.plan import make_plan
from tfscale.schedules.named_schedules import gpipe
from tfscale.schedules.named_schedules import one_f_one_b
from tfscale.schedules.named_schedules import pipedream
from tfscale.schedules.schedule import Schedule
from tfscale.schedules.simulate import simulate


def _chain(*widths):
    """Dense layers "dense_0", "dense_1", ... of these widths, with ReLU."""
    x = inputs = keras.Input((widths[0],))
    for index, width in enumerate(widths):
        x = keras.layers.Dense(width, activation="relu", name=f"dense_{index}")(
            x
        )
    return keras.Model(inputs, x, name="chain")


def _plan(model, balance, num_stages=2, **kwargs):
    return make_plan(model, one_f_one_b(num_stages, 4), balance, **kwargs)


def _begins(plan):
    """The layers with which the stages begin."""
    return [stage.layers[0] for stage in plan.stages]


class Tower(keras.layers.Layer):
    """Four layers, called by one."""

    def __init__(self):
        super().__init__(name="tower")
        self.inner = [keras.layers.Dense(32) for _ in range(4)]

    def build(self, shape):
        for layer in self.inner:
            layer.build(shape)

    def call(self, x):
        for layer in self.inner:
            x = layer(x)
        return x


def nested_tower():
    layers = [keras.layers.Dense(32, name=f"inner_{i}") for i in range(4)]
    return keras.Sequential([keras.Input((32,)), *layers], name="tower")


class BalanceTest(tf.test.TestCase, parameterized.TestCase):
    # With width 16, a block has some 3,264 parameters and 3,328 multiply-adds
    # per token. The logits have 4,352 and 4,096, so stage 1 gets them and
    # fewer than two blocks; but where parameters count, the embeddings have
    # as many, so stage 0 gets them and both have two blocks.
    @parameterized.named_parameters(
        ("flops", "flops", "block_2_mlp_down"),
        ("params", "params", "block_2_attention"),
        ("list", ["block_1_mlp_up"], "block_1_mlp_up"),
        ("tuple", ("logits",), "logits"),
    )
    def test_gpt_is_cut(self, balance, expected):
        model = gpt.build_gpt(4, 16, 2, 8, dropout=0.0)
        plan = _plan(model, balance)
        self.assertEqual(_begins(plan)[1], expected)
        # Nothing is lost and nothing is there twice.
        calls = [call for stage in plan.stages for call in stage.calls]
        self.assertEqual(calls, list(plan.graph.calls))

    def test_params_and_flops_differ_where_weights_are_used_often(self):
        # The convolution has 1/10 of the weights, used 144 times.
        inputs = keras.Input((12, 12, 4))
        x = keras.layers.Conv2D(4, 3, padding="same", name="conv_0")(inputs)
        x = keras.layers.Conv2D(4, 3, padding="same", name="conv_1")(x)
        x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
        x = keras.layers.Dense(300, name="dense")(x)
        model = keras.Model(inputs, x)
        self.assertEqual(_begins(_plan(model, "flops")), ["conv_0", "conv_1"])
        # The pooling has no weights, and makes less to send.
        self.assertEqual(_begins(_plan(model, "params")), ["conv_0", "dense"])

    def test_time_is_what_was_measured(self):
        measured = [(1, 2, 1)] * 3 + [(6, 3, 0)]
        plan = _plan(_chain(8, 8, 8, 8), "time", measure=lambda _: measured)
        self.assertEqual(_begins(plan), ["dense_0", "dense_3"])
        self.assertEqual(plan.stage_costs, ([3, 6], [6, 3], [3, 0]))
        self.assertEqual(
            plan.simulation.makespan,
            simulate(
                plan.schedule,
                forward=[3 / 4.5, 6 / 4.5],
                backward=[6 / 4.5, 3 / 4.5],
                weight=[3 / 4.5, 0],
            ).makespan,
        )

    @parameterized.parameters((1, "auto: zb_h1"), (0, "auto: 1f1b"))
    @pytest.mark.crossing(every=2)
    def test_auto_goes_by_what_was_measured(self, weight, expected):
        # Without work for W nothing is gained by putting it off.
        plan = make_plan(
            _chain(8, 8, 8, 8),
            one_f_one_b(4, 8),
            "time",
            measure=lambda _: [(1, 2, weight)] * 4,
            choose_schedule=True,
        )
        self.assertEqual(plan.schedule.name, expected)

    def test_calls_can_be_measured_for_a_plan(self):
        plan = _plan(
            # Nearly all the work is in the first two layers.
            _chain(1024, 1024, 8, 8),
            "time",
            measure=lambda graph: measure.measure_calls(graph, "/CPU:0", 64),
        )
        self.assertEqual(_begins(plan), ["dense_0", "dense_1"])

    @parameterized.parameters(
        (Tower, ["first", "tower", "last"]),
        (nested_tower, ["first", *(f"inner_{i}" for i in range(4)), "last"]),
    )
    def test_a_nested_model_is_cut_inside_and_a_layer_is_not(self, make, names):
        inputs = keras.Input((32,))
        x = make()(keras.layers.Dense(32, name="first")(inputs))
        model = keras.Model(inputs, keras.layers.Dense(32, name="last")(x))
        plan = _plan(model, "flops")
        self.assertEqual([call.name for call in plan.graph.calls], names)

    def test_a_layer_that_is_called_twice_has_its_parameters_once(self):
        inputs = keras.Input((8,))
        shared = keras.layers.Dense(8, name="shared")
        x = shared(keras.layers.Dense(8)(shared(inputs)))
        plan = _plan(keras.Model(inputs, x), "params")
        self.assertEqual(parameters(plan.graph), [72, 72, 0])

    @parameterized.named_parameters(
        ("name", "speed", "balance='speed'"),
        ("number", 2, "balance=2"),
        ("none", None, "balance=None"),
    )
    def test_unknown_balance_is_refused(self, balance, message):
        with self.assertRaisesRegex(
            ValueError, f"'time' or a list of layer names. .*{message}"
        ):
            _plan(_chain(8, 8, 8), balance)

    @parameterized.named_parameters(
        ("no_layer", ["block_2_atention"], "mean 'block_2_attention'"),
        ("too_few", [], "2 stages need 1 cut points"),
        ("too_many", ["block_0_mlp_up", "logits"], "2 stages need 1 cut"),
        ("first", ["tokens_embedding"], "'tokens_embedding', the first"),
    )
    def test_wrong_cut_points_are_refused(self, balance, message):
        model = gpt.build_gpt(4, 16, 2, 8, dropout=0.0)
        with self.assertRaisesRegex(ValueError, message):
            _plan(model, balance)

    def test_more_stages_than_layers_are_refused(self):
        with self.assertRaisesRegex(
            ValueError, "4 stages, and the model 'chain' with 3 layers"
        ):
            _plan(_chain(8, 8, 8), "flops", num_stages=4)

    def test_synchronized_batch_normalization_is_refused(self):
        inputs = keras.Input((8,))
        x = keras.layers.Dense(8)(inputs)
        x = keras.layers.BatchNormalization(synchronized=True, name="norm")(x)
        with self.assertRaisesRegex(ValueError, "'norm' with synchronized"):
            _plan(keras.Model(inputs, x), "flops")


class MemoryLimitTest(tf.test.TestCase):
    """Six layers of 64 x 64 weights in two stages, 256 rows in a microbatch.

    A layer has 4,160 float32 numbers, four times (weights, gradients, two
    slots of Adam): 66,560 bytes. What it keeps of a microbatch is its ReLU,
    256 * 64 * 4 = 65,536 bytes. The first layer keeps its input too, and the
    loss as much as it is given. While the backward of a layer runs, there are
    the gradients of its ReLU and of its weights.
    """

    def _begins(self, schedule, memory_limit, balance="flops", **kwargs):
        plan = make_plan(
            _chain(*[64] * 6),
            schedule,
            balance,
            memory_limit=memory_limit,
            microbatch_size=256,
            **kwargs,
        )
        return _begins(plan)[1]

    def _bytes(self, layers, tensors):
        return layers * 66_560 + tensors * 65_536 + 65_536 + 66_560 // 4

    def test_the_first_stage_gets_less_where_it_holds_more_microbatches(self):
        # 1F1B: two microbatches in flight in stage 0, one in stage 1.
        schedule = one_f_one_b(2, 4)
        limit = self._bytes(layers=3, tensors=2 * 4)
        self.assertEqual(self._begins(schedule, None), "dense_3")
        self.assertEqual(self._begins(schedule, limit), "dense_3")
        self.assertEqual(self._begins(schedule, limit - 1), "dense_2")

    def test_what_fits_nowhere_is_refused_with_the_least_that_does(self):
        least = self._bytes(layers=4, tensors=5)
        self.assertEqual(self._begins(one_f_one_b(2, 4), least), "dense_2")
        with self.assertRaisesRegex(
            ValueError,
            f"memory_limit={least - 1:,} bytes, .* needs least needs {least:,}",
        ):
            self._begins(one_f_one_b(2, 4), least - 1)

    def test_gpipe_needs_more_than_1f1b_and_recomputing_less(self):
        limit = self._bytes(layers=3, tensors=2 * 4)
        self._begins(one_f_one_b(2, 4), limit)
        with self.assertRaisesRegex(ValueError, "must fit the memory limit"):
            self._begins(gpipe(2, 4), limit)
        self._begins(gpipe(2, 4), limit, recompute=True)

    def test_given_cut_points_must_fit_too(self):
        limit = self._bytes(layers=5, tensors=2 * 6)
        balance = ["dense_5"]
        self._begins(one_f_one_b(2, 4), limit, balance)
        with self.assertRaisesRegex(ValueError, "must fit the memory limit"):
            self._begins(one_f_one_b(2, 4), limit - 1, balance)

    def test_stages_of_one_device_share_its_memory(self):
        schedule = Schedule([["F0.0", "F1.0", "B1.0", "B0.0"]])
        limit = 2 * self._bytes(layers=3, tensors=4)
        self.assertEqual(self._begins(schedule, limit), "dense_3")
        with self.assertRaisesRegex(ValueError, "must fit the memory limit"):
            self._begins(schedule, limit - 2)


def _shared_in_the_middle():
    """Two layers of equal weights amid six of the same size."""
    shared = keras.layers.Dense(64, name="shared")
    layers = [keras.layers.Dense(64, name=f"dense_{i}") for i in range(6)]
    x = inputs = keras.Input((64,))
    for layer in (*layers[:3], shared, shared, *layers[3:]):
        x = layer(x)
    return keras.Model(inputs, x)


class TiedWeightsTest(tf.test.TestCase, parameterized.TestCase):
    """A layer costs 3 x 8,256 FLOPs, the exchange moves 2 x 16,640 bytes."""

    @parameterized.parameters(
        (0, 1, [4, 4]),
        # 33,280 x 23 FLOPs over the 32 rows of a batch are just less than a
        # layer, and x 24 just more.
        (23, 1, [4, 4]),
        (24, 1, [3, 5]),
        # A batch of 4 x 16 rows.
        (24, 16, [4, 4]),
    )
    def test_stay_together_where_their_exchange_costs_more(
        self, flops_per_byte, microbatch_size, expected
    ):
        plan = _plan(
            _shared_in_the_middle(),
            "flops",
            flops_per_byte=flops_per_byte,
            microbatch_size=microbatch_size,
        )
        sizes = [len(stage.calls) for stage in plan.stages]
        self.assertEqual(sizes, expected)

    @parameterized.parameters("time", "params")
    @pytest.mark.crossing(every=2)
    def test_other_costs_are_compared_alike(self, balance):
        plan = _plan(
            _shared_in_the_middle(),
            balance,
            flops_per_byte=100,
            measure=lambda graph: [(1e-5, 2e-5, 1e-5)] * len(graph.calls),
        )
        self.assertTrue(all(len(plan.users(v)) == 1 for v in plan.variables))

    def test_stages_that_update_by_themselves_share_no_weights(self):
        plan = make_plan(
            _shared_in_the_middle(), pipedream(2, num_batches=1), "flops"
        )
        self.assertTrue(all(len(plan.users(v)) == 1 for v in plan.variables))


class PlanTest(tf.test.TestCase):
    def test_tied_variables_live_in_the_first_stage_that_uses_them(self):
        inputs = keras.Input((8,))
        shared = keras.layers.Dense(8, name="shared")
        x = shared(inputs)
        x = keras.layers.Dense(8, name="middle")(x)
        x = shared(x)
        model = keras.Model(inputs, x)
        plan = _plan(model, ["middle"])
        self.assertLen(plan.variables, 4)
        self.assertEqual(plan.homes, (0, 0, 1, 1))
        self.assertEqual(plan.stages[1].layers, ["middle", "shared"])

    def test_simulation_has_flops_as_costs(self):
        plan = _plan(_chain(16, 16, 16, 16), ["dense_3"], recompute=True)
        expected = simulate(plan.schedule, forward=[1.5, 0.5], recompute=True)
        self.assertEqual(plan.simulation, expected)


if __name__ == "__main__":
    tf.test.main()
