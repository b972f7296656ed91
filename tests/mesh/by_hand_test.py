"""Methods of the strategy by hand: model ranks are seen by none of them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale

SUM = tf.distribute.ReduceOp.SUM
# Of all replicas, one object.
SHARED = [1.0, 2.0]


def mesh_strategy(**axes):
    layouts = {".*up/kernel": (None, "model")} if "model" in axes else None
    return tfscale.MeshStrategy(tfscale.device_mesh(**axes), layouts)


def context():
    return tf.distribute.get_replica_context()


def number():
    """1.0 in the first replica, 2.0 in the second."""
    index = tf.cast(context().replica_id_in_sync_group, tf.float32)
    return tf.reshape(index + 1.0, [1])


def merged(function):
    """What a function makes of all replicas' numbers, where they meet."""
    return context().merge_call(function, args=(number(),))


def gathered_gradient():
    with tf.GradientTape() as tape:
        x = number()
        tape.watch(x)
        y = tf.reduce_sum(context().all_gather(x, 0) * [1.0, 10.0])
    return tape.gradient(y, x)


MESHES = [{"data": 2}, {"data": 2, "model": 2}]


class ReplicasTest(parameterized.TestCase):
    @parameterized.product(axes=MESHES, is_graph=[True, False])
    @pytest.mark.crossing(every=4)
    def test_results_are_those_of_replicas(self, axes, is_graph):
        # With model ranks each replica's value came once for each rank, and a
        # tensor object that replicas have in common was summed up once. So is
        # the gradient of a sum, which TensorFlow keeps to give it again.
        strategy = mesh_strategy(**axes)
        with strategy.scope():
            keras.layers.Dense(2, name="up").build((None, 2))
            shared = tf.constant(SHARED)

        def replica():
            return {
                "gathered": context().all_gather(number(), 0),
                "gathered_gradient": gathered_gradient(),
                "gathered_shared": context().all_gather(shared, 0),
                "gathered_ragged": context().all_gather(
                    tf.fill(tf.cast(number(), tf.int32), number()[0]), 0
                ),
                "sum": context().all_reduce(SUM, number()),
                "sum_of_shared": context().all_reduce(SUM, shared),
                "mean_of_shared": context().all_reduce("MEAN", shared),
                "sum_of_number": context().all_reduce(SUM, 1.0),
                "sum_in_dict": context().all_reduce(SUM, {"a": shared})["a"],
                "merged": merged(lambda s, x: s.reduce(SUM, x, axis=None)),
                "merged_gathered": merged(lambda s, x: s.gather(x, axis=0)),
                "merged_results": merged(
                    lambda s, x: tf.add_n(s.experimental_local_results(x))
                ),
                "merged_number": merged(
                    lambda s, x: len(s.experimental_local_results([x]))
                ),
            }

        def run():
            return strategy.run(replica)

        results = tf.function(run, autograph=False)() if is_graph else run()
        both = {
            "gathered": [1.0, 2.0],
            "gathered_shared": [*SHARED, *SHARED],
            "gathered_ragged": [1.0, 2.0, 2.0],
            "sum": [3.0],
            "sum_of_shared": [2.0, 4.0],
            "mean_of_shared": SHARED,
            "sum_of_number": 2.0,
            "sum_in_dict": [2.0, 4.0],
            "merged": [3.0],
            "merged_gathered": [1.0, 2.0],
            "merged_results": [3.0],
            "merged_number": 2,
        }
        expected = {name: [value] * 2 for name, value in both.items()}
        # Each gets its part of both replicas' gradients.
        expected["gathered_gradient"] = [[2.0], [20.0]]
        for name, values in expected.items():
            found = strategy.experimental_local_results(results[name])
            if len(found) == 1:
                # The same for both.
                found *= 2
            self.assertLen(found, 2, name)
            np.testing.assert_array_equal(found, values, name)

    @parameterized.parameters(*MESHES)
    def test_variables_are_added_up_over_replicas(self, **axes):
        strategy = mesh_strategy(**axes)
        kinds = [
            (tf.VariableAggregation.SUM, tf.VariableSynchronization.ON_WRITE),
            (tf.VariableAggregation.SUM, tf.VariableSynchronization.ON_READ),
            (tf.VariableAggregation.MEAN, tf.VariableSynchronization.ON_WRITE),
            (tf.VariableAggregation.MEAN, tf.VariableSynchronization.ON_READ),
            (
                tf.VariableAggregation.ONLY_FIRST_REPLICA,
                tf.VariableSynchronization.ON_READ,
            ),
        ]
        with strategy.scope():
            keras.layers.Dense(2, name="up").build((None, 2))
            variables = [
                tf.Variable([0.0], aggregation=how, synchronization=when)
                for how, when in kinds
            ]

        def replica():
            for variable in variables:
                variable.assign_add(number())

        strategy.run(tf.function(replica, autograph=False))
        self.assertEqual(
            [float(v.read_value()[0]) for v in variables],
            [3.0, 3.0, 1.5, 1.5, 1.0],
        )

    def test_gradients_that_replicas_share_are_of_each(self):
        # Keras' own test of gradient accumulation has such ones.
        strategy = mesh_strategy(data=2)
        gradient = tf.constant([1.0, 2.0])
        with strategy.scope():
            variable = keras.Variable([1.0, 2.0])
            optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)
        for _ in range(3):
            strategy.run(lambda: optimizer.apply([gradient], [variable]))
        np.testing.assert_array_equal(variable, [-1.0, -2.0])

    @parameterized.parameters(
        ({"data": 2}, 0), ({"data": 2}, 1), ({"model": 2}, 0)
    )
    def test_an_optimizer_may_be_built_by_its_first_step(self, axes, stage):
        # Slots of ScheduleFreeAdamW begin with the weights: on the second
        # replica they were zero, and so went its weights.
        gradient = tf.reshape(tf.range(8.0), (2, 4))

        def train(is_built):
            layouts = {".*up/kernel": (None, "model")}
            strategy = tfscale.MeshStrategy(
                tfscale.device_mesh(**axes),
                layouts if "model" in axes else None,
                zero_stage=stage,
            )
            with strategy.scope():
                layer = keras.layers.Dense(
                    4, use_bias=False, kernel_initializer="ones", name="up"
                )
                layer.build((None, 2))
                optimizer = keras.optimizers.ScheduleFreeAdamW(0.1)
                if is_built:
                    optimizer.build([layer.kernel])

            def step():
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(gradient * layer.kernel)
                kernels = [layer.kernel]
                optimizer.apply(tape.gradient(loss, kernels), kernels)

            for _ in range(2):
                strategy.run(step)
            return layer.kernel.value, optimizer.variables

        (kernel, slots), (expected, expected_slots) = train(False), train(True)
        for one, other in zip(kernel.values, expected.values):
            np.testing.assert_array_equal(one, other)
        for one, other in zip(slots, expected_slots, strict=True):
            np.testing.assert_array_equal(one, other)
