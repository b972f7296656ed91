"""Schedules that a user may write, dropout, and what runs when."""

import functools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tfscale.pipeline import PipelineModel
from tfscale.pipeline.running.executor import Tensors
from tfscale.pipeline.running.executor import run_schedule
from tfscale.pipeline.tracing.keys import LOSSES
from tfscale.pipeline.tracing.keys import Target
from tfscale.pipeline.tracing.phases import Phase
from tfscale.schedules import schedule as schedules
from tfscale.schedules.action import Action
from tfscale.schedules.looped_schedules import interleaved
from tfscale.schedules.looped_schedules import zb_h1

RANDOM = np.random.RandomState(0)
FEATURES = RANDOM.normal(size=(34, 6)).astype("float32")
TARGETS = RANDOM.normal(size=(34, 3)).astype("float32")


def build():
    """Four layers with weights, a skip over all of them, one layer twice."""
    inputs = keras.Input((6,))
    x = a = keras.layers.Dense(6, "tanh", name="a")(inputs)
    twice = keras.layers.Dense(6, "tanh", name="b")
    x = keras.layers.Dense(6, "tanh", name="c")(twice(x))
    x = keras.layers.Add()([twice(x), a])
    return keras.Model(inputs, keras.layers.Dense(3, name="d")(x))


def with_dropout(rate=0.5):
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, "tanh", name="a")(inputs)
    x = keras.layers.Dropout(rate)(x)
    x = keras.layers.Dense(8, "tanh", name="b")(x)
    x = keras.layers.GaussianDropout(rate)(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="c")(x))


def job(build=build, rows=34):
    return same_numbers.Job(
        build,
        dict(x=FEATURES[:rows], y=TARGETS[:rows], batch_size=16),
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    )


def whole_batches(build=build):
    """No batch is smaller than the others: half the traces."""
    return job(build, rows=32)


@functools.cache
def one_device():
    return same_numbers.on_one_device(job())


def drop(**options):
    return same_numbers.on_mesh(
        whole_batches(with_dropout), 2, 4, balance=["b"], **options
    )


@functools.cache
def dropped():
    return drop()


# Weight gradients apart for one microbatch of one stage only.
SOME_WEIGHTS_APART = schedules.Schedule(
    [
        ["F0.0", "F0.1", "B0.0", "B0.1", "W0.0"],
        ["F1.0", "F1.1", "B1.0", "B1.1"],
    ]
)


class UserSchedulesTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("interleaved", interleaved(2, 4, 2), False),
        ("interleaved_again", interleaved(2, 4, 2), True),
        ("zero_bubble", zb_h1(3, 4), False),
        ("zero_bubble_again", zb_h1(3, 4), True),
        ("some_weights_apart", SOME_WEIGHTS_APART, False),
    )
    @pytest.mark.crossing(every=5)
    def test_three_steps(self, schedule, recompute):
        cuts = ["b", "c", "d"][: schedule.num_stages - 1]
        many = same_numbers.on_mesh(
            job(),
            schedule.num_devices,
            schedule.num_microbatches,
            schedule=schedule,
            balance=cuts,
            recompute=recompute,
        )
        same_numbers.assert_same(self, one_device(), many)

    @pytest.mark.crossing
    def test_schedules_differ_in_nothing_but_time(self):
        # Gradients are added up in the order of microbatches in all of them.
        outcomes = [
            same_numbers.on_mesh(
                whole_batches(),
                *(2, 4),
                schedule=schedule,
                balance=["c"],
                recompute=again,
            )
            for schedule, again in (
                ("gpipe", False),
                ("1f1b", False),
                ("1f1b", True),
            )
        ]
        for outcome in outcomes[1:]:
            same_numbers.assert_equal(self, outcomes[0], outcome)


class DropoutTest(parameterized.TestCase):
    def test_recomputation_has_the_same_masks(self):
        same_numbers.assert_equal(self, dropped(), drop(recompute=True))

    @pytest.mark.crossing
    def test_equal_seeds_give_equal_masks(self):
        same_numbers.assert_equal(self, dropped(), drop())
        kernel = dropped().variables["a/kernel"]
        without = functools.partial(with_dropout, 0.0)
        plain = same_numbers.on_one_device(whole_batches(without))
        self.assertGreater(
            np.abs(kernel - plain.variables["a/kernel"]).max(), 1e-3
        )

    @pytest.mark.crossing
    def test_with_one_microbatch_masks_are_those_of_plain_keras(self):
        dropping = whole_batches(with_dropout)
        one = same_numbers.on_one_device(dropping)
        many = same_numbers.on_mesh(dropping, 2, 1, balance=["b"])
        same_numbers.assert_same(self, one, many)

    def test_each_microbatch_has_a_mask_of_its_own(self):
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((64,)),
                    keras.layers.Dropout(0.5),
                    keras.layers.Dense(64, name="b"),
                ]
            )
            before = np.array(model.layers[-1].kernel)
            pipeline = PipelineModel(model, 4, balance=["b"])
            pipeline.compile(
                keras.optimizers.SGD(1.0), lambda y, prediction: prediction
            )
        pipeline.fit(np.ones((4, 64)), np.ones((4, 64)), verbose=0)
        # The gradient by the weights of an input is the number of rows in
        # which it was kept, times 2 for the rate, over 4 x 64 outputs.
        moved = before - np.array(model.layers[-1].kernel)
        kept = np.round(moved[:, 0] * 4 * 64 / 2)
        self.assertEqual(set(kept), {0.0, 1.0, 2.0, 3.0, 4.0})


class RanksTest(parameterized.TestCase):
    def test_an_action_is_one_call_for_all_ranks_of_a_replica(self):
        calls = []

        def total(*terms):
            calls.append([float(x) for x in terms])
            return [tf.add_n(terms), -tf.add_n(terms), tf.zeros(())]

        def keys(key):
            return tuple((rank, key) for rank in range(2))

        forward = Phase(total, keys(Target(0)), keys(LOSSES))
        ranks = [
            Tensors({}, {}, {}, [{Target(0): x + m} for m in range(2)])
            for x in tf.constant([1.0, 10.0])
        ]
        run_schedule(
            [Action("F", 0, 0), Action("F", 0, 1)],
            [{"F": forward}],
            [("CPU:0", "CPU:1")],
            ranks,
        )
        self.assertEqual(calls, [[1.0, 10.0], [2.0, 11.0]])
        self.assertEqual(
            [
                [float(m[LOSSES]) for m in of_rank.microbatches]
                for of_rank in ranks
            ],
            [[11.0, 13.0], [-11.0, -13.0]],
        )

    @parameterized.parameters(1, 2)
    @pytest.mark.crossing(every=2)
    def test_a_call_waits_by_its_arguments_alone(self, num_ranks):
        # A control edge on a call became one for each constant of the
        # function: the first step at 32 microbatches took three times as long.
        with tf.Graph().as_default() as graph:

            @tf.function
            def forward(*terms):
                return [x + 1.0 for x in terms] + [tf.zeros(())]

            tensors = [
                Tensors({}, {}, {}, [{Target(0): tf.ones(())} for _ in "abc"])
                for _ in range(num_ranks)
            ]
            function = forward.get_concrete_function(
                *[tf.TensorSpec(())] * num_ranks
            )
            keys_in = tuple((rank, Target(0)) for rank in range(num_ranks))
            keys_out = tuple((rank, LOSSES) for rank in range(num_ranks))
            run_schedule(
                [Action("F", 0, m) for m in range(3)],
                [{"F": Phase(function, keys_in, keys_out)}],
                [[f"CPU:{rank}" for rank in range(num_ranks)]],
                tensors,
            )
        calls = [op for op in graph.get_operations() if "Call" in op.type]
        self.assertLen(calls, 3)
        for number, call in enumerate(calls):
            self.assertEmpty(call.control_inputs)
            for tensor in call.inputs:
                waits_for = [before.type for before in tensor.op.control_inputs]
                self.assertEqual(waits_for, ["Identity"] * (number > 0))

    def test_ranks_meet_once_for_a_schedule_of_any_length(self):
        random = np.random.RandomState(0)
        data = dict(x=random.randn(8, 4), y=random.randn(8, 4), batch_size=8)

        def meetings(num_microbatches):
            mesh = tfscale.device_mesh(model=2)
            layouts = {".*up/kernel": (None, "model")}
            same_numbers.reset()
            with tfscale.MeshStrategy(mesh, layouts).scope():
                up = keras.layers.Dense(4, name="up")
                model = keras.Sequential([keras.Input((4,)), up])
                model = PipelineModel(model, num_microbatches)
                model.compile("sgd", "mse")
            model.fit(**data, verbose=0)
            context = tf.distribute.ReplicaContext
            with mock.patch.object(
                context,
                "merge_call",
                autospec=True,
                side_effect=context.merge_call,
            ) as merge_call:
                model.make_train_function(force=True)
                model.fit(**data, verbose=0)
            return merge_call.call_count

        once = meetings(1)
        self.assertGreater(once, 0)
        self.assertEqual(meetings(4), once)
