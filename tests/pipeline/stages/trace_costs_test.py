"""What a trace of each call tells of a model whose sizes are open."""

import keras
import keras_hub
import tensorflow as tf
from absl.testing import parameterized

from tfscale.graphs import flops
from tfscale.pipeline.stages.graph import flatten_model
from tfscale.pipeline.stages.plan import make_plan
from tfscale.pipeline.stages.trace_costs import UNKNOWN_LENGTH
from tfscale.pipeline.stages.trace_costs import trace_costs
from tfscale.pipeline.stages.traced_call import trace_call
from tfscale.schedules.named_schedules import one_f_one_b


class Looked(keras.layers.Layer):
    """Positions from an embedding: nothing static tells how many."""

    def __init__(self, positions):
        super().__init__()
        self.positions = keras.layers.Embedding(positions, 4)
        self.positions.build((None,))

    def call(self, x):
        length = keras.ops.shape(x)[1]
        return x + self.positions(keras.ops.arange(length))


class TimeMajor(keras.layers.Layer):
    """Makes another shape than it promises, like one of keras_hub's XLNet."""

    def call(self, x):
        table = keras.ops.transpose(x, (1, 0, 2))
        return keras.ops.concatenate([table, table], 0)

    def compute_output_shape(self, input_shape):
        return (1, input_shape[1], 4)


class Refuses(keras.layers.Layer):
    """Works with no length that is known when it is traced."""

    def call(self, x):
        if tf.inside_function() and x.shape[1] is not None:
            raise ValueError("not this one")
        return x


def sliced(positions):
    return keras_hub.layers.PositionEmbedding(positions)


def language_model(positions):
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(9, 4)(tokens)
    return keras.Model(tokens, keras.layers.Dense(9)(positions(x)))


class LengthTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (sliced, 77, 77),
        (sliced, 200, UNKNOWN_LENGTH),
        # Nothing says that there are too few.
        (Looked, 77, UNKNOWN_LENGTH),
    )
    def test_is_what_position_embeddings_have(self, make, positions, length):
        # Of CLIP, which has 77, a summary was an error of the gradient's.
        model = language_model(make(positions))
        plan = make_plan(model, one_f_one_b(2, 2), "flops", memory_limit=1e9)
        self.assertEqual(plan.graph.length, length)
        head = plan.graph.calls[-1]
        self.assertEqual(
            plan.graph.specs[head.outputs[0]].shape, (None, length, 9)
        )
        self.assertEqual(plan.graph.calls[-1].flops, length * (2 * 4 * 9 + 9))

    def test_is_that_of_inputs_and_others_follow(self):
        x = inputs = keras.Input((None, None, 3))
        for _ in range(2):
            x = keras.layers.Conv2D(4, 3, strides=2, padding="same")(x)
        graph = trace_costs(flatten_model(keras.Model(inputs, x)))
        self.assertEqual(
            [graph.specs[call.outputs[0]].shape for call in graph.calls],
            [(None, 64, 64, 4), (None, 32, 32, 4)],
        )

    def test_goes_through_layers_that_promise_another_shape(self):
        # A length of 2 was found, with which a summary was a raw error.
        graph = trace_costs(flatten_model(language_model(TimeMajor())))
        self.assertEqual(
            graph.specs[graph.calls[-1].outputs[0]].shape,
            (2 * UNKNOWN_LENGTH, 1, 9),
        )

    def test_is_asked_for_where_none_is_found(self):
        model = language_model(Refuses())
        plan = make_plan(model, one_f_one_b(2, 2), "flops")
        self.assertIsNone(plan.graph.length)
        with self.assertRaisesRegex(ValueError, r"Set the sizes of its inputs"):
            make_plan(model, one_f_one_b(2, 2), "flops", memory_limit=1e9)

    def test_is_none_where_all_is_known(self):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        self.assertIsNone(trace_costs(flatten_model(model)).length)


class CallsTest(tf.test.TestCase):
    def test_rows_may_be_folded_into_the_batch(self):
        # Frames of a video, say. What unfolds them was traced with one row,
        # and no such model could be wrapped.
        inputs = keras.Input((4, 3))
        x = keras.layers.Dense(5)(keras.ops.reshape(inputs, (-1, 3)))
        model = keras.Model(inputs, keras.ops.reshape(x, (-1, 4, 5)))
        plan = make_plan(model, one_f_one_b(2, 2), "flops", memory_limit=1e9)
        folded, dense, _ = (call.outputs[0] for call in plan.graph.calls)
        self.assertEqual(plan.graph.multiples, {folded: 4, dense: 4})
        self.assertEqual(plan.graph.calls[1].flops, 4 * (2 * 3 * 5 + 5))
        self.assertEqual(plan.graph.with_rows(dense, 2).shape, (8, 5))

    def test_equal_calls_are_traced_once_and_different_ones_apart(self):
        traced = []

        class Counted(keras.layers.Dense):
            def call(self, inputs):
                if tf.inside_function():
                    traced.append(self)
                return super().call(inputs)

        inputs = keras.Input((5, 4))
        outputs = [Counted(n)(inputs) for n in (4, 4, 3)]
        graph = flatten_model(keras.Model(inputs, outputs))
        traced.clear()
        found = trace_costs(graph)
        self.assertLen(traced, 2)
        self.assertEqual(
            [call.flops for call in found.calls],
            [
                flops.function_flops(trace_call(c.operation, (inputs,), {}))
                for c in graph.calls
            ],
        )

    def test_a_variable_belongs_to_the_calls_that_use_it(self):
        # The head of an untied embedding lived with the embedding, and the
        # last stage had no parameters.
        tokens = keras.Input((5,), dtype="int32")
        embedding = keras_hub.layers.ReversibleEmbedding(
            9, 6, tie_weights=False
        )
        x = keras.layers.Dense(6)(embedding(tokens))
        model = keras.Model(tokens, embedding(x, reverse=True))
        plan = make_plan(model, one_f_one_b(2, 2), "params")
        self.assertEqual(
            [[v.name for v in stage.variables] for stage in plan.stages],
            [["embeddings"], ["kernel", "bias", "reverse_embeddings"]],
        )
        self.assertEqual(plan.homes, (0, 1, 1, 1))

    def test_random_layers_that_are_shared_keep_their_seeds(self):
        inputs = keras.Input((6,))
        dropout = keras.layers.Dropout(0.5)
        x = dropout(keras.layers.Dense(6)(dropout(inputs)))
        plan = make_plan(keras.Model(inputs, x), one_f_one_b(2, 2), "flops")
        for stage in plan.stages:
            self.assertLen(stage.state, 1)


if __name__ == "__main__":
    tf.test.main()
